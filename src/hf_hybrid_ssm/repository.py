"""Where the sources of the installed package live, by its metadata (`hatch_build.py` writes them)."""

import importlib.metadata

from hf_hybrid_ssm.extras import DISTRIBUTION


def source_address() -> str | None:
    """The repository's page, such as "https://example.org/me/hf-hybrid-ssm"; None where the build knew none."""
    try:
        links = importlib.metadata.metadata(DISTRIBUTION).get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    urls = dict(link.split(", ", 1) for link in links)
    return urls.get("Repository")
