"""The repository's address among the package's metadata, asked from where it is known: a fork changes nothing; and
the compiled kernels of `tools/wheels.py` in a wheel, which is then for one kind of machine.

A workflow on a forge says it in its environment, a clone in the address of its remote. Where neither does, the
metadata have no address. `hf_hybrid_ssm.repository` reads it from there.
"""

import os
import re
import subprocess  # git, when the package is built  # noqa: TID251
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


def web_address(remote: str) -> str | None:
    """The page of a remote, without user, password and `.git`: "git@host:a/b.git" → "https://host/a/b".

    None of what is no address of a host, such as a folder.
    """
    found = re.fullmatch(r"(?:(?:https?|ssh|git)://)?(?:[^@/\s]+@)?([\w.-]+\.\w+)(?::\d+)?[:/]([\w./~-]+?)/?", remote)
    if found is None or (":" not in remote and "://" not in remote):
        return None
    return f"https://{found[1]}/{found[2].removesuffix('.git').strip('/')}"


def repository(root: Path) -> str | None:
    """The address of the repository whose sources lie in `root`."""
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and name:
        return f"{server}/{name}"
    if not (root / ".git").exists():  # the sources lie in no clone, and a folder above may be another's
        return None
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:  # no git here
        return None
    return web_address(asked.stdout.strip()) if asked.returncode == 0 else None


class RepositoryHook(MetadataHookInterface):
    """`urls` of the project's metadata."""

    def update(self, metadata: dict) -> None:
        address = repository(Path(self.root))
        metadata["urls"] = {} if address is None else {"Repository": address}


class LibrariesHook(BuildHookInterface):
    """The folder of libraries that the environment names, in a wheel of the tag that it names."""

    def initialize(self, version: str, build_data: dict) -> None:
        if folder := os.environ.get("HF_HYBRID_SSM_LIBRARIES"):
            build_data["force_include"][folder] = "hf_hybrid_ssm/ops/_compiled"
            build_data |= {"pure_python": False, "tag": os.environ["HF_HYBRID_SSM_WHEEL_TAG"]}
