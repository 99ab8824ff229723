"""Two kernels on instruction sets that other tests do not run: compiled for them, and run as they are or in qemu.

Without AVX-512, its form runs in split vectors here. `CC="gcc -DLANES=16" python -m pytest tests/ops` has all tests of
the ops run it.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_hybrid_ssm.ops.core import instruction_sets, native_build

OPS = Path(native_build.__file__).parents[1]
IS_X86 = platform.machine() == "x86_64"
LESSER = instruction_sets.available()[1:] if IS_X86 else ()  # the best one is what all other tests run
RUNS = {level: ["gcc", f"-march={instruction_sets.LEVELS[level]}"] for level in LESSER}
if IS_X86 and instruction_sets.in_use() != "avx512":
    RUNS["avx512"] = ["gcc", instruction_sets.march(), "-DLANES=16"]
RUNS["aarch64"] = ["aarch64-linux-gnu-gcc" if IS_X86 else "gcc", "-march=armv8-a"]
LANES = {"avx512": 16, "avx2": 8, "default": 4, "aarch64": 4}


@pytest.mark.parametrize("name", RUNS)
def test_kernels_equal_plain_loops(name, tmp_path):
    (compiler, *chosen), emulator = RUNS[name], []
    if name == "aarch64" and IS_X86:
        emulator = [shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static") or "qemu-aarch64"]
    if missing := [program for program in (compiler, *emulator) if not shutil.which(program)]:
        pytest.skip(f"{missing[0]} is not here")
    program, driver = tmp_path / "run", Path(__file__).with_name("other_processors.c")
    sources = map(str, (driver, OPS / "causal_conv/native.c", OPS / "longhorn_scan/native.c"))
    flags = ["-O1", "-std=gnu11", "-fopenmp", "-static", *chosen, f"-I{native_build.INCLUDES}"]
    subprocess.run([compiler, *flags, *sources, "-o", str(program), "-lm"], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True)
    lanes, convolution, scan = done.stdout.split()
    assert int(lanes) == LANES[name] and float(convolution) < 1e-5 and float(scan) < 1e-5
