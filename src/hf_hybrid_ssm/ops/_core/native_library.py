"""Compiles a C file of this package on first use and loads it.

Without a compiler there is no native backend, and the torch backend runs instead. The compiled file is kept in the
user's cache folder (HF_HYBRID_SSM_CACHE, else XDG_CACHE_HOME or ~/.cache) under a name that holds a hash of source,
headers, compiler, flags and processor, and it ends with a hash of itself: a damaged file is compiled again. Code in a
folder that others can write to is not loaded; this process then compiles its own copy.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess  # noqa: TID251 - starts the C compiler alone
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONTIGUOUS_DTYPES = (torch.float32, torch.float64, torch.int64)  # what C reads without being told
INCLUDES = Path(__file__).parent  # of the headers that the C files share
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp")

# longhorn_native_times_as_fast["longhorn torch"] of benchmarks/results/longhorn_training.json
NO_COMPILER = "no C compiler was found; with gcc or clang (or CC set) a small Longhorn trains 4.3 times as fast"


@cache
def _compiler() -> tuple[str, ...] | None:
    """The command of the C compiler; CC may be a path, or a command with arguments such as `ccache gcc`."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        if not command:
            continue
        program, *arguments = [command] if shutil.which(command) else shlex.split(command)
        if found := shutil.which(program):
            return (found, *arguments)
    return None


def missing_compiler() -> str | None:
    """None if native code can be compiled here, else the reason it cannot."""
    if platform.system() != "Linux":
        return f"native code is compiled on Linux only, this is {platform.system()}"
    return None if _compiler() else NO_COMPILER


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if a C kernel of this package can run on such tensors, else the reason it cannot."""
    if device_type != "cpu":
        return f"it runs on the CPU, not on {device_type}"
    if dtype not in DTYPES:
        return f"it computes in float32, which is too coarse for {dtype}"
    return missing_compiler()


def prepared(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """In the form that C takes: contiguous float32."""
    if tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.float().contiguous()


def prepared_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Float32 (B, D) whose rows are contiguous, but may lie apart."""
    if tensor is None or (tensor.dtype == torch.float32 and tensor.stride(-1) == 1):
        return tensor
    return tensor.float().contiguous()


def is_plain_call(tensor: torch.Tensor) -> bool:
    """Whether C may be called without torch.library in between, which takes longer than the functions of decoding.

    Not while something traces or watches the calls (`torch.compile`, a dispatch mode), nor for a subclass of tensors.
    The caller knows that no gradient is wanted.
    """
    return type(tensor) is torch.Tensor and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode()


def step_op(name: str, compute: Callable[..., Any], fake: Callable[..., Any], changes: tuple[str, ...]) -> Callable:
    """`compute`, which overwrites the arguments that `changes` names and has no gradient: called as it is where its
    first argument allows it (`is_plain_call`), else as an op of torch.library."""
    op = torch.library.custom_op(name, compute, mutates_args=changes, device_types="cpu")
    op.register_fake(fake)
    return lambda *arguments: (compute if is_plain_call(arguments[0]) else op)(*arguments)


def address(tensor: torch.Tensor, *, is_strided: bool = False) -> int:
    """Where C finds the numbers of a contiguous tensor, or of one whose strides it is told.

    Raises:
        TypeError: not in the memory of the CPU (a meta or fake tensor has none), of another dtype, or not contiguous.
    """
    at = tensor.data_ptr() if tensor.is_cpu else None
    dtypes = DTYPES if is_strided else CONTIGUOUS_DTYPES
    is_right = tensor.dtype in dtypes and (is_strided or tensor.is_contiguous())
    if at is None or not is_right or (at == 0 and tensor.numel()):
        raise TypeError(
            f"a C kernel takes {'' if is_strided else 'contiguous '}tensors in the memory of the CPU, one of "
            f"{', '.join(map(str, dtypes))}; got {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}, "
            f"address {at}."
        )
    return at


def call(function: Callable[..., int], tensors: Iterable[torch.Tensor | int | None], *numbers: float) -> None:
    """Call a C function with the data of contiguous tensors (null for None), the numbers, and that of the threads.

    An integer among the tensors is the `address` of one whose strides are among the numbers.

    Raises:
        MemoryError: it returned something else than 0.
        TypeError: a tensor that C cannot read, see `address`.
    """
    pointers = [address(part) if isinstance(part, torch.Tensor) else part for part in tensors]
    if not function.argtypes:  # type: ignore[attr-defined]
        types: list = [ctypes.c_void_p] * len(pointers)
        types += [ctypes.c_double if isinstance(number, float) else ctypes.c_int64 for number in (*numbers, 1)]
        function.argtypes = types  # type: ignore[attr-defined]
    if function(*pointers, *numbers, torch.get_num_threads()):
        raise MemoryError(f"{function.__name__} ran out of memory for its temporary sums.")


def library_beside(module: str) -> Callable[[], ctypes.CDLL]:
    """What gives the library of the C file beside a module (its `__file__`), compiled when first asked for."""
    return cache(lambda: compile_and_load(Path(module).with_suffix(".c")))


def compile_and_load(source: Path) -> ctypes.CDLL:
    """The shared library of `source`, compiled unless it already was.

    Raises:
        OSError: the compiler failed; the message holds what it said.
    """
    reason = missing_compiler()
    if reason:
        raise OSError(reason)
    target = _cache_folder() / f"{source.stem}-{_fingerprint(source)}.so"
    if _is_whole(target):
        try:
            return ctypes.CDLL(str(target))
        except OSError as error:  # for example, a library it was linked to is gone
            logger.warning("%s does not load (%s); it is compiled again.", target, error)
    _compile(source, target)
    return ctypes.CDLL(str(target))


def _is_whole(library: Path) -> bool:
    """Whether the file ends with the hash of what precedes: loading a truncated one would crash the process."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    return len(content) > size and hashlib.sha256(content[:-size]).digest() == content[-size:]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("HF_HYBRID_SSM_CACHE") or Path(base, "hf_hybrid_ssm"))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = _unsafe(folder)
    except OSError as error:
        reason = str(error)
    if reason is None:
        return folder
    logger.warning("Compiled code cannot be kept in %s: %s. This process compiles its own copy.", folder, reason)
    return _private_folder()


def _unsafe(folder: Path) -> str | None:
    """Why code in `folder` must not be trusted or cannot be written; None if all is well."""
    status = folder.stat()
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}, not to {os.getuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (chmod go-w {shlex.quote(str(folder))})"
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


@cache
def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hf_hybrid_ssm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _fingerprint(source: Path) -> str:
    processor = Path("/proc/cpuinfo")
    flags = [
        line for line in processor.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))
    ]
    headers = (*sorted(INCLUDES.glob("*.h")), *sorted(source.parent.glob("*.h")))
    code = [path.read_bytes() for path in (source, *headers)]
    parts = (*code, " ".join(_compiler() or ()), *FLAGS, *sorted(set(flags)), torch.__version__)
    return hashlib.sha256(b"\0".join(p if isinstance(p, bytes) else p.encode() for p in parts)).hexdigest()[:16]


def _openmp() -> list[str]:
    """torch's own OpenMP runtime, so that both share one pool of threads; the system's if torch ships none."""
    carried = sorted(Path(torch.__file__).parent.joinpath("lib").glob("libgomp*.so*"))
    return [str(carried[0]), f"-Wl,-rpath,{carried[0].parent}"] if carried else ["-fopenmp"]


def _compile(source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built, compiler = Path(folder, target.name), _compiler() or ()
        compiling = [*compiler, *FLAGS, f"-I{INCLUDES}", "-c", str(source), "-o", f"{built}.o"]
        linking = [*compiler, "-shared", f"{built}.o", "-o", str(built), *_openmp(), "-lm"]
        for step in (compiling, linking):
            done = subprocess.run(step, capture_output=True, text=True)  # noqa: S603 - a list of arguments, no shell
            if done.returncode:
                raise OSError(f"{' '.join(step)} failed:\n{done.stderr.strip()}")
        content = built.read_bytes()
        with built.open("ab") as file:
            file.write(hashlib.sha256(content).digest())
        os.replace(built, target)  # atomic: another process may be doing the same
