"""GCC and clang, where they are installed, take every C file without a warning, for every instruction set."""

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_hybrid_ssm.ops.core import native_build
from hf_hybrid_ssm.ops.linear_scan import native_step
from tests.ops import random_cases, sanitize

SOURCES = sorted(Path(native_build.__file__).parents[1].glob("*/native*.c"))
LEVELS = ["x86-64-v4", "x86-64-v3", "x86-64"] if platform.machine() == "x86_64" else ["native"]
INSTALLED = [name for name in ("gcc", "clang") if shutil.which(name)]
pytestmark = pytest.mark.skipif(native_build.missing_compiler() is not None, reason="no C compiler")


def has_openmp(compiler: str) -> bool:
    program = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }"
    command = [compiler, "-fopenmp", "-x", "c", "-", "-fsyntax-only"]
    return subprocess.run(command, input=program, text=True, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("compiler", INSTALLED or ["cc"])
def test_no_warnings(compiler):
    if not shutil.which(compiler) or not has_openmp(compiler):
        pytest.skip(f"{compiler} is not here, or without OpenMP")
    assert len(SOURCES) >= 7
    flags = [*native_build.FLAGS, f"-I{native_build.INCLUDES}", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    commands = [[compiler, *flags, f"-march={level}", str(source)] for source in SOURCES for level in LEVELS]
    with ThreadPoolExecutor(2) as threads:
        for done in threads.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands):
            assert done.returncode == 0, done.stderr


@pytest.mark.skipif("clang" not in INSTALLED, reason="no clang")
def test_clang_makes_a_kernel_that_is_right(tmp_path, monkeypatch):
    """One of them; with its own OpenMP runtime beside torch's."""
    if not has_openmp("clang"):
        pytest.skip("clang is without OpenMP")
    monkeypatch.setenv("CC", "clang")
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path))
    monkeypatch.setattr(native_build, "SHIPPED", tmp_path / "nothing")
    native_build._compiler.cache_clear()
    try:
        library = native_build.compile_and_load(Path(native_step.__file__).with_suffix(".c"))
    finally:
        monkeypatch.delenv("CC")
        native_build._compiler.cache_clear()
    assert native_build._is_clang(("clang",)) and not native_build._is_clang(("gcc",))
    monkeypatch.setattr(native_step.STEP, "library", lambda: library)
    monkeypatch.setattr(native_step.STEP, "_function", None)
    for seed in range(10):
        assert random_cases.deviation("system_token", seed) <= sanitize.LIMIT
    monkeypatch.setattr(native_step.STEP, "_function", None)
