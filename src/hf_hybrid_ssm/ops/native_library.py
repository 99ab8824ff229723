"""Compiles a C file of this package on first use and loads it.

No compiler, no native backend: that costs time, nothing else. The compiled file is kept in the user's cache folder
(HF_HYBRID_SSM_CACHE, else XDG_CACHE_HOME or ~/.cache) under a name that holds a hash of source, compiler, flags and
processor.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp")


@cache
def _compiler() -> str | None:
    for name in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name.split()[0])):
            return found
    return None


def missing_compiler() -> str | None:
    """None if native code can be compiled here, else the reason it cannot."""
    if platform.system() != "Linux":
        return f"native code is compiled on Linux only, this is {platform.system()}"
    return None if _compiler() else "no C compiler was found (set CC, or install gcc or clang)"


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if a C kernel of this package can run on such tensors, else the reason it cannot."""
    if device_type != "cpu":
        return f"it runs on the CPU, not on {device_type}"
    if dtype not in DTYPES:
        return f"it computes in float32, which is too coarse for {dtype}"
    return missing_compiler()


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Where the data of a contiguous tensor lies, for C; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def compile_and_load(source: Path) -> ctypes.CDLL:
    """The shared library of `source`, compiled unless it already was.

    Raises:
        OSError: the compiler failed; the message holds what it said.
    """
    reason = missing_compiler()
    if reason:
        raise OSError(reason)
    target = _cache_folder() / f"{source.stem}-{_fingerprint(source)}.so"
    if not target.exists():
        _compile(source, target)
    return ctypes.CDLL(str(target))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("HF_HYBRID_SSM_CACHE") or Path(base, "hf_hybrid_ssm"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fingerprint(source: Path) -> str:
    processor = Path("/proc/cpuinfo")
    flags = [
        line for line in processor.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))
    ]
    parts = (source.read_bytes(), str(_compiler()), *FLAGS, *sorted(set(flags)), torch.__version__)
    return hashlib.sha256(b"\0".join(p if isinstance(p, bytes) else p.encode() for p in parts)).hexdigest()[:16]


def _openmp() -> list[str]:
    """torch's own OpenMP runtime, so that both share one pool of threads; the system's where torch carries none."""
    carried = sorted(Path(torch.__file__).parent.joinpath("lib").glob("libgomp*.so*"))
    return [str(carried[0]), f"-Wl,-rpath,{carried[0].parent}"] if carried else ["-fopenmp"]


def _compile(source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder, target.name)
        command = [str(_compiler()), *FLAGS, "-c", str(source), "-o", f"{built}.o"]
        link = [str(_compiler()), "-shared", f"{built}.o", "-o", str(built), *_openmp(), "-lm"]
        for step in (command, link):
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{' '.join(step)} failed:\n{done.stderr.strip()}")
        os.replace(built, target)  # atomic: another process may be doing the same
