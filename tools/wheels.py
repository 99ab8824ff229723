"""A wheel with the C kernels inside: who installs it needs no compiler.

python -m tools.wheels                        # for this machine, into dist/
python -m tools.wheels --check                # and run it from a folder of its own, without a compiler
python -m tools.wheels --machine aarch64 --compiler aarch64-linux-gnu-gcc

Python loads the kernels by ctypes, so one wheel serves every version of Python and torch. It holds each kernel for
every instruction set of `ops.core.instruction_sets`, of which the best is chosen where it runs. Libraries name no
OpenMP runtime, since torch brings its own; that the tag's C library is enough for them is checked.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from hf_hybrid_ssm.ops.core.instruction_sets import LEVELS
from hf_hybrid_ssm.ops.core.native_build import FLAGS, INCLUDES, shipped_name

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for path in (ROOT / "src/hf_hybrid_ssm/ops").glob("*/native*.c"))
MARCH = {
    "x86_64": {name: f"-march={level}" for name, level in LEVELS.items()},
    "aarch64": {"default": "-march=armv8-a"},
}
GLIBC = (2, 28)
NEEDED = {"libc.so.6", "libm.so.6", "ld-linux-aarch64.so.1"}
PROGRAM = """
import ctypes, importlib, json, pkgutil, torch
from hf_hybrid_ssm import ops
from hf_hybrid_ssm.ops.core import instruction_sets, native_build
from hf_hybrid_ssm.ops.core.dispatch import REGISTRY
for found in pkgutil.iter_modules(ops.__path__):
    importlib.import_module(f"{ops.__name__}.{found.name}")
kernels = [op for op in REGISTRY.values() if "native" in op.kernels]
status = {op.name: op.explain("cpu", torch.float32)["native"] for op in kernels}
loaded = {level: len([ctypes.CDLL(str(file)) for file in (native_build.SHIPPED / level).iterdir()])
          for level in instruction_sets.available()}
print(json.dumps([native_build.__file__, native_build._compiler(), status, loaded]))
"""


def compiled(source: Path, machine: str, level: str, compiler: list[str], folder: Path) -> Path:
    """The library of one kernel for one instruction set.

    Raises:
        RuntimeError: it needs more than the tag of the wheel says is there.
    """
    built, part = folder / shipped_name(source), folder / f"{source.stem}.o"
    flags = [*FLAGS, MARCH[machine][level], f"-I{INCLUDES}", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(part)], check=True)
    subprocess.run(
        [*compiler, "-shared", "-s", "-Wl,--hash-style=both", str(part), "-o", str(built), "-lm"], check=True
    )
    part.unlink()
    _check_needs(built)
    return built


def _check_needs(library: Path) -> None:
    command = ["readelf", "-dVW", str(library)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if more := set(re.findall(r"\(NEEDED\).*\[(.+)\]", report)) - NEEDED:
        raise RuntimeError(f"{library.name} needs {sorted(more)}.")
    newest = max(
        (tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_(\d+\.\d+)", report)), default=GLIBC
    )
    if newest > GLIBC:
        raise RuntimeError(f"{library.name} needs glibc {newest[0]}.{newest[1]}, the tag says {GLIBC[0]}.{GLIBC[1]}.")


def tag(machine: str) -> str:
    return f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"


def build(machine: str, compiler: list[str], into: Path) -> Path:
    """The wheel, from the sources of this repository; hatch_build.py puts the libraries into it."""
    with tempfile.TemporaryDirectory() as folder:
        for level in MARCH[machine]:
            place = Path(folder, level)
            place.mkdir()
            for source in SOURCES:
                compiled(source, machine, level, compiler, place)
        environment = os.environ | {"HF_HYBRID_SSM_LIBRARIES": folder, "HF_HYBRID_SSM_WHEEL_TAG": tag(machine)}
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return max(into.glob(f"*-{tag(machine)}.whl"), key=lambda path: path.stat().st_mtime)


def check(wheel: Path) -> None:
    """Install it into a folder of its own, and run every kernel of it where there is no compiler.

    Raises:
        RuntimeError: a kernel did not run, or something was compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        place, cache = Path(folder, "installed"), Path(folder, "cache")
        install = ["install", "--quiet", "--no-deps", "--target", str(place), str(wheel)]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
        without = {"PATH": folder, "CC": "no-such-compiler", "HF_HYBRID_SSM_CACHE": str(cache)}
        environment = os.environ | without | {"PYTHONPATH": str(place)}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        file, compiler, status, loaded = json.loads(done.stdout.splitlines()[-1])
        failed = {name: reason for name, reason in status.items() if reason != "runs"}
        if failed or not status or cache.exists() or not Path(file).is_relative_to(place):
            raise RuntimeError(f"{wheel.name}: {failed or status}; {file}; compiled: {cache.exists()}")
        found = "none" if compiler is None else " ".join(compiler)
        print(f"{wheel.name}: {len(status)} kernels run; libraries that load: {loaded}; compiler: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", choices=MARCH, default=platform.machine(), help="default: this machine's")
    parser.add_argument("--compiler", default=os.environ.get("CC", "gcc"), help="default: CC, or gcc")
    parser.add_argument("--check", action="store_true", help="install it elsewhere and run it without a compiler")
    arguments = parser.parse_args()
    wheel = build(arguments.machine, shlex.split(arguments.compiler), arguments.into)
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MB")
    if arguments.check:
        check(wheel)


if __name__ == "__main__":
    main()
