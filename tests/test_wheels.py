"""Wheels with kernels inside: what is put into them, what they may need, and that they are used without a compiler."""

import ctypes
import platform
import zipfile

import pytest

from hf_hybrid_ssm.ops.core import instruction_sets, native_build
from tools import wheels

pytestmark = pytest.mark.skipif(
    native_build.missing_compiler() is not None or platform.machine() not in wheels.MARCH, reason="no C compiler"
)
SOURCE = "int add(int a, int b) { return a + b; }\n"
PARALLEL = """#include <omp.h>
int team(int threads) {
    int size = 0;
#pragma omp parallel num_threads(threads)
#pragma omp single
    size = omp_get_num_threads();
    return size;
}
"""


@pytest.fixture
def compiler():
    native_build._compiler.cache_clear()  # another test may have asked for another
    return list(native_build._compiler())


def library(tmp_path, compiler, text, level="default"):
    (tmp_path / "op").mkdir(exist_ok=True)
    source = tmp_path / "op" / "native.c"
    source.write_text(text, encoding="utf-8")
    (tmp_path / level).mkdir(exist_ok=True)
    return source, wheels.compiled(source, platform.machine(), level, compiler, tmp_path / level)


def test_a_wheel_with_libraries(tmp_path, compiler, monkeypatch):
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    monkeypatch.setattr(wheels, "SOURCES", [library(tmp_path, compiler, SOURCE)[0]])
    machine, wheel = platform.machine(), wheels.build(platform.machine(), compiler, tmp_path / "dist")
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    with zipfile.ZipFile(wheel) as files:
        head = next(name for name in files.namelist() if name.endswith(".dist-info/WHEEL"))
        assert {"Root-Is-Purelib: false", f"Tag: {wheels.tag(machine)}"} <= set(files.read(head).decode().splitlines())
        inside = [name for name in files.namelist() if name.startswith("hf_hybrid_ssm/ops/_compiled/")]
        assert sorted(name.split("/")[3] for name in inside) == sorted(wheels.MARCH[machine])


def test_what_a_library_may_need(tmp_path, compiler):
    with pytest.raises(RuntimeError, match=r"needs glibc 2\.29, the tag says 2\.28"):
        library(tmp_path, compiler, "#include <math.h>\ndouble f(double x) { return exp(x); }\n")


def test_the_kernels_ask_for_nothing_more():
    """One of them is compiled, the one with most of the C library in it; `make wheels` compiles all."""
    assert {path.parent.name for path in wheels.SOURCES} >= {"longhorn_scan", "local_attention", "causal_conv"}
    text = "".join(path.read_text(encoding="utf-8") for path in (wheels.ROOT / "src").rglob("*.[ch]"))
    for function in ("exp(", "log(", "pow(", "exp2(", "log2("):
        assert not [line for line in text.splitlines() if f" {function}" in line and "/*" not in line], function


def test_a_shipped_library_is_used_without_a_compiler(tmp_path, compiler, monkeypatch, caplog):
    """With the threads of torch's runtime; where sources differ from those it was made of, it is not."""
    source, _ = library(tmp_path, compiler, PARALLEL)
    monkeypatch.setattr(native_build, "SHIPPED", tmp_path)
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HYBRID_SSM_CPU", "default")
    monkeypatch.setattr(native_build, "_compiler", lambda: None)
    assert native_build.missing_compiler() is None
    assert native_build.compile_and_load(source).team(ctypes.c_int(2)) == 2
    assert not (tmp_path / "cache").exists()
    source.write_text(PARALLEL + "\n", encoding="utf-8")
    with pytest.raises(OSError, match="the shipped library is of other sources"):
        native_build.compile_and_load(source)
    monkeypatch.setenv("HF_HYBRID_SSM_CPU", "avx512")
    reason = native_build.missing_compiler()
    assert reason and ("no C compiler" in reason or "this processor does not have it" in reason)


def test_the_best_that_the_processor_has_is_chosen(tmp_path, monkeypatch):
    for name in ("avx512", "avx2", "default"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(native_build, "SHIPPED", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("HF_HYBRID_SSM_CPU", raising=False)
    avx2 = "flags : sse2 avx avx2 bmi1 bmi2 f16c fma movbe"
    for line, best in {
        avx2: "avx2",
        f"{avx2} avx512f avx512bw avx512cd avx512dq avx512vl": "avx512",
        f"{avx2} avx512f": "avx2",
        "flags : sse2 avx": "default",
    }.items():
        monkeypatch.setattr(instruction_sets, "processor", lambda line=line: (line,))
        assert instruction_sets.in_use() == best and native_build._shipped_folder() == tmp_path / best


def test_an_instruction_set_without_a_name(monkeypatch):
    monkeypatch.setenv("HF_HYBRID_SSM_CPU", "sse9")
    with pytest.raises(ValueError, match="HF_HYBRID_SSM_CPU='sse9' is not an instruction set"):
        instruction_sets.held_to()
    monkeypatch.setenv("HF_HYBRID_SSM_CPU", "avx2")
    assert "-march=x86-64-v3" in native_build._flags() or platform.machine() != "x86_64"
