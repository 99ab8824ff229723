"""Programs that were compiled before there was a card: the folder that Triton finds them in, and its archive.

The folder has the same path on both sides, since Triton writes absolute paths into it. A program is found there if
Python's minor version, Triton's files, the card's generation and the kernels' source are the same; what is not found
is compiled as if nothing had been carried.
"""

import hashlib
import importlib.util
import os
import sys
import tarfile
from pathlib import Path

from benchmarks.gpu.plan import ROOT

FOLDER = ROOT / "build" / "card"  # which travels with the source tree
ARCHIVE = FOLDER / "triton.tar.gz"
CACHE = Path("/tmp/hf-hybrid-ssm-ahead")  # noqa: S108 - `own` refuses one that belongs to somebody else
KEY = "key.txt"
KEPT = (".cubin", ".json", ".txt")  # of a program; the rest is for reading


def key() -> str:
    """Of the Triton that compiles: another finds nothing in the folder."""
    from triton.runtime.cache import triton_key

    python = ".".join(map(str, sys.version_info[:2]))
    return f"Python {python}, Triton {hashlib.sha256(triton_key().encode()).hexdigest()[:16]}"


def own(folder: Path) -> None:
    """Make the folder, for this user alone.

    Raises:
        ValueError: it is there and somebody else's, who could have put programs into it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ValueError(f"{folder} is not this user's folder: remove it.")


def pack(cache: Path, archive: Path) -> float:
    """Write an archive of what a launch reads; → megabytes."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    draft = archive.with_suffix(".draft")
    with tarfile.open(draft, "w:gz") as tar:
        for file in sorted(cache.rglob("*")):
            if file.is_file() and file.suffix in KEPT:
                tar.add(file, file.relative_to(cache).as_posix())
    draft.replace(archive)
    return archive.stat().st_size / 2**20


def unpack(cache: Path, archive: Path) -> str:
    """Fill the folder from an archive if there is one; what came of it, in a line."""
    if not archive.is_file():
        return f"There is no {os.path.relpath(archive)}: every program is compiled here."
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: {os.path.relpath(archive)} is of no use here."
    own(cache)
    with tarfile.open(archive) as tar:
        tar.extractall(cache, filter="data")
    made, here = (cache / KEY).read_text(encoding="utf-8").strip(), key()
    found = "they are found" if made == here else "none is found, and every program is compiled here"
    return f"Programs made ahead with {made}; here {here}: {found}."


def environment(device: str) -> dict[str, str]:
    """Of the process that launches kernels."""
    if device == "cpu":
        return {"TRITON_INTERPRET": "1"}
    return {"TRITON_CACHE_DIR": str(CACHE)} if ARCHIVE.is_file() else {}
