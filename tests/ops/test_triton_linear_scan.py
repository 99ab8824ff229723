"""The Triton kernels of the linear scans, run by Triton's interpreter, and compiled for cards that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.4")
CASES = Path(__file__).with_name("test_linear_scan_kernels.py")
INTEGERS = {"L", "channels", "filters", "num_states"}


def test_kernels_agree_with_the_reference():
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def compile_for(kernel, capability: int, constants: dict, num_warps: int):
    """The compiled kernel with every option on that is not said otherwise; needs no card."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(parameter):
        if parameter.is_constexpr:
            return "constexpr"
        if parameter.name in INTEGERS or parameter.name.endswith(("_row", "_step", "_filter")):
            return "i32"
        if parameter.name in ("seq_idx", "lengths"):
            return "*i64"
        return "*fp64" if parameter.name == "decay" else "*fp32"

    signature = {parameter.name: kind(parameter) for parameter in kernel.params}
    constants = {name: constants.get(name, True) for name, what in signature.items() if what == "constexpr"}
    source, target = ASTSource(kernel, signature, constants), GPUTarget("cuda", capability, 32)
    return compile(source, target=target, options={"num_warps": num_warps, "enable_fp_fusion": True})


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_cards(capability, tmp_path, monkeypatch):
    """To machine code: the interpreter accepts more than the compiler does."""
    from hf_hybrid_ssm.ops.linear_scan import triton as launcher
    from hf_hybrid_ssm.ops.linear_scan import triton_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    passes = (launcher.FORWARD, launcher.DERIVATIVE, launcher.BACKWARD)
    cases = [(kernels.channel_kernel, {**launcher.channel_tile(32), "PASS": run_pass}) for run_pass in passes]
    cases.append((kernels.diagonal_kernel, dict(launcher.DIAGONAL_TILE)))
    for kernel, constants in cases:
        compiled = compile_for(kernel, capability, constants, num_warps=constants.pop("num_warps"))
        assert f".entry {kernel.__name__}" in compiled.asm["ptx"] and compiled.asm["cubin"]
