"""The folder of compiled and measured kernels: where it is, and whether what lies there may be trusted."""

import os
import shlex
import stat
from pathlib import Path


def cache_folder() -> Path:
    """HF_HYBRID_SSM_CACHE, else `hf_hybrid_ssm` in XDG_CACHE_HOME or ~/.cache; it need not exist.

    Raises:
        OSError: none is named, and this user has no home directory.
    """
    if named := os.environ.get("HF_HYBRID_SSM_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache", "hf_hybrid_ssm")
    except RuntimeError as error:
        raise OSError("there is no home directory (name a folder in HF_HYBRID_SSM_CACHE)") from error


def unsafe(path: Path) -> str | None:
    """The reason why another user could have written a file or folder; None if only this user or root can.

    It and all folders that it lies in must belong to one of the two, and be writable by nobody else; a folder that it
    lies in may have the sticky bit, as /tmp has, so that others cannot replace what is not theirs.
    """
    path = path.resolve(strict=True)
    for place in (path, *path.parents):
        status = place.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{place} belongs to user {status.st_uid}, not to {os.getuid()}"
        is_sticky = place != path and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
            return f"others may write to {place} (chmod go-w {shlex.quote(str(place))})"
    return None
