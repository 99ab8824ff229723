"""Download the source distribution of the installed transformers, which holds its own tests, and print where it lies.

    HF_HYBRID_SSM_UPSTREAM_TESTS=$(python tests/upstream/fetch.py)

It is unpacked once below `.cache/upstream`. Without a package index it says so on stderr, prints nothing on stdout and
exits with 1: the tests that need it are then skipped.
"""

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "upstream"


def download(release: str, folder: Path) -> Path:
    """The .tar.gz of `transformers==release`, downloaded into `folder` by pip.

    Raises:
        OSError: pip could not get it; the message holds the end of what pip said.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--dest", str(folder), f"transformers=={release}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"pip could not download transformers=={release}:\n" + "\n".join(done.stderr.splitlines()[-5:]))
    return next(folder.glob("*.tar.gz"))


def unpack(archive: Path, target: Path) -> None:
    """Move the one folder within `archive` to `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
        (inner,) = Path(folder).iterdir()
        inner.rename(target)


def main() -> int:
    release = version("transformers")
    target = CACHE / f"transformers-{release}"
    if not (target / "tests" / "test_modeling_common.py").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            try:
                unpack(download(release, Path(folder)), target)
            except OSError as error:
                print(f"transformers' own tests are not available here: {error}", file=sys.stderr)
                return 1
    print(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
