"""The library of a C file of this package: shipped with a wheel, or compiled on first use and kept.

A wheel for one kind of processor holds libraries for several instruction sets (`SHIPPED`); the best one that this
processor has is loaded, and no compiler is needed. They name no OpenMP runtime, but find torch's, which is loaded.

Elsewhere the machine's C compiler makes the library, for this very processor. What it made is kept in the user's cache
folder (`cache_folder`) under a name that holds a hash of source, headers, compiler, flags and processor, and ends with
a hash of itself: a damaged file is compiled again. What others could have written is not loaded; this process then
compiles its own copy. Processes that need a library at the same time wait for one of them to make it.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess  # noqa: TID251 - starts the C compiler alone
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from hf_hybrid_ssm.ops.core import instruction_sets
from hf_hybrid_ssm.ops.core.cache_folder import cache_folder, unsafe

logger = logging.getLogger(__name__)

INCLUDES = Path(__file__).parent  # of the headers that the C files share
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp")
# longhorn_native_times_as_fast["longhorn torch"] of benchmarks/results/longhorn_training.json
NO_COMPILER = (
    "no C compiler was found; with gcc, or clang and libomp (or CC set), a small Longhorn trains 8.5 times as fast"
)
SHIPPED = Path(__file__).parents[1] / "_compiled"  # / instruction set / op-file-hash.so, see tools/wheels.py
UNFINISHED = "unfinished-"  # how the folder of a compilation begins


@cache
def _compiler() -> tuple[str, ...] | None:
    """The command of the C compiler; CC may be a path, or a command with arguments such as `ccache gcc`."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        if not command:
            continue
        try:
            program, *arguments = [command] if shutil.which(command) else shlex.split(command)
        except ValueError as error:  # a quote that does not end
            _say_once(f"CC={command!r} is not a command ({error}); another compiler is looked for.")
            continue
        if path := shutil.which(program):
            return (path, *arguments)
    return None


def missing_compiler() -> str | None:
    """None if native code was shipped for this processor or can be compiled here, else the reason it cannot."""
    if platform.system() != "Linux":
        return f"native code is compiled on Linux only, this is {platform.system()}"
    if reason := instruction_sets.missing():
        return reason
    if _compiler() or _shipped_folder():
        return None
    return NO_COMPILER


def origin() -> str | None:
    """Where the C kernels come from, "shipped for avx2" or "compiled by /usr/bin/gcc"; None if there are none."""
    if missing_compiler():
        return None
    folder, compiler = _shipped_folder(), _compiler()
    if folder and all((folder / shipped_name(source)).exists() for source in INCLUDES.parent.glob("*/native*.c")):
        return f"shipped for {folder.name}"
    return f"compiled by {' '.join(compiler)}" if compiler else None


def _shipped_folder() -> Path | None:
    """Where the libraries for this processor are, if this package was installed with them."""
    names = (instruction_sets.held_to(),) if instruction_sets.held_to() else instruction_sets.available()
    return next((SHIPPED / name for name in names if name and (SHIPPED / name).is_dir()), None)


def compile_and_load(source: Path) -> ctypes.CDLL:
    """The shared library of `source`, compiled unless it already was.

    Raises:
        OSError: the compiler failed; the message holds what it said.
    """
    reason = missing_compiler()
    if reason:
        raise OSError(reason)
    folder = _shipped_folder()
    if folder and (shipped := folder / shipped_name(source)).exists():
        _load_openmp()
        return ctypes.CDLL(str(shipped))
    if not _compiler():
        raise OSError("no C compiler was found, and the shipped library is of other sources than these")
    name = f"{source.stem}-{_fingerprint(source)}.so"
    if library := _loaded(_place() / name):
        return library
    folder = _writable_place()
    with _alone_in(folder):
        if library := _loaded(folder / name):  # another process has made it meanwhile
            return library
        _compile(source, folder / name)
    return ctypes.CDLL(str(folder / name))


def _loaded(library: Path) -> ctypes.CDLL | None:
    """The library in this file, or None if there is none that is whole and can be trusted."""
    try:
        library = library.resolve(
            strict=True
        )  # what is checked is what is read and loaded, wherever a link leads then
        reason = unsafe(library)
        content = library.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = str(error)
    if reason:
        logger.warning("%s is not loaded: %s.", library, reason)
        return None
    if not _is_whole(content):
        return None
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # for example, a library it was linked to is gone
        logger.warning("%s does not load (%s); it is compiled again.", library, error)
        return None


def _is_whole(content: bytes) -> bool:
    """Whether a file ends with the hash of what precedes: loading a truncated one would crash the process."""
    size = hashlib.sha256().digest_size
    return len(content) > size and hashlib.sha256(content[:-size]).digest() == content[-size:]


def _place() -> Path:
    """The folder where compiled code is looked for, made if there is none; it may be one that only root can write."""
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)  # a link on the way may be somebody else's, and lead elsewhere later
        reason = unsafe(folder)
    except OSError as error:
        folder, reason = Path("the cache folder"), str(error)
    return _instead_of(folder, reason) if reason else folder


def _writable_place() -> Path:
    """The folder where compiled code is kept."""
    folder = _place()
    return folder if os.access(folder, os.W_OK | os.X_OK) else _instead_of(folder, "it cannot be written to")


def _instead_of(folder: Path, reason: str) -> Path:
    _say_once(f"Compiled code cannot be kept in {folder}: {reason}. This process compiles its own copy.")
    return _private_folder()


@cache
def _say_once(message: str) -> None:
    logger.warning(message)


@cache
def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hf_hybrid_ssm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process at a time compiles into a folder, and first removes what a killed one has left there."""
    import fcntl  # which Windows does not have, where nothing is compiled

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: each process compiles, and the last one's file stays
            pass
        else:
            for left in folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def shipped_name(source: Path) -> str:
    """The file name of the library that a wheel holds of `source`."""
    return f"{source.parent.name}-{source.stem}-{_hash(*_code(source))}.so"


def _code(source: Path) -> list[bytes]:
    """The C file and its headers."""
    headers = (*sorted(INCLUDES.glob("*.h")), *sorted(source.parent.glob("*.h")))
    return [path.read_bytes() for path in (source, *headers)]


def _hash(*parts: bytes | str) -> str:
    return hashlib.sha256(b"\0".join(p if isinstance(p, bytes) else p.encode() for p in parts)).hexdigest()[:16]


def _flags() -> tuple[str, ...]:
    return (*FLAGS, instruction_sets.march())


def _fingerprint(source: Path) -> str:
    made_by = (" ".join(_compiler() or ()), *_flags(), *instruction_sets.processor(), torch.__version__)
    return _hash(*_code(source), *made_by)


def _torchs_openmp() -> Path | None:
    """torch's own OpenMP runtime, so that both share one pool of threads."""
    return next(iter(sorted(Path(torch.__file__).parent.joinpath("lib").glob("libgomp*.so*"))), None)


@cache
def _load_openmp() -> None:
    """For libraries that name none: torch's runtime, or the system's if torch ships none."""
    ctypes.CDLL(str(_torchs_openmp() or "libgomp.so.1"), ctypes.RTLD_GLOBAL)


@cache
def _is_clang(compiler: tuple[str, ...]) -> bool:
    macros = [*compiler, "-dM", "-E", "-x", "c", os.devnull]
    done = subprocess.run(macros, capture_output=True, text=True)  # noqa: S603 - a list of arguments, no shell
    return "__clang__" in done.stdout


def _openmp(compiler: tuple[str, ...]) -> list[str]:
    """How to link with OpenMP: what clang compiles calls a runtime of its own (libomp)."""
    carried = _torchs_openmp()
    if carried is None or _is_clang(compiler):
        return ["-fopenmp"]
    return [str(carried), f"-Wl,-rpath,{carried.parent}"]


def _compile(source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=target.parent) as folder:
        built, compiler = Path(folder, target.name), _compiler() or ()
        compiling = [*compiler, *_flags(), f"-I{INCLUDES}", "-c", str(source), "-o", f"{built}.o"]
        linking = [*compiler, "-shared", f"{built}.o", "-o", str(built), *_openmp(compiler), "-lm"]
        for step in (compiling, linking):
            done = subprocess.run(step, capture_output=True, text=True)  # noqa: S603 - a list of arguments, no shell
            if done.returncode:
                raise OSError(f"{' '.join(step)} failed:\n{done.stderr.strip()}")
        content = built.read_bytes()
        with built.open("ab") as file:
            file.write(hashlib.sha256(content).digest())
        built.chmod(0o700)  # whatever the umask says
        os.replace(built, target)  # atomic: whoever looks finds a whole file or none
