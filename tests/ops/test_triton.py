"""The Triton kernels, run by Triton's interpreter where there is no card, and compiled for cards that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.4")
CASES = Path(__file__).with_name("triton_cases.py")


def test_kernels_agree_with_the_reference():
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


POINTERS_TO_INPUTS = {"x", "beta_logit", "z", "k", "q", "grad_o", "o", "dx", "dlogit", "dz", "grad_y", "y", "weight"}
NUMBERS = {"L", "channels", "num_states", "num_blocks", "blocks_per_split", "size", "num_splits", "T", "W", "FIRST"}
NUMBERS |= {"input_channels", "num_rows", "num_tiles"}


def compile_for(kernel, capability: int, constants: dict, num_warps: int):
    """The compiled kernel, bfloat16 inputs; needs no card."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(parameter):
        if parameter.is_constexpr:
            return "constexpr"
        if parameter.name in NUMBERS or parameter.name.endswith(("_row", "_step")):
            return "i32"
        if parameter.name == "seq_idx":
            return "*i64"
        return "*bf16" if parameter.name in POINTERS_TO_INPUTS else "*fp32"

    signature = {parameter.name: kind(parameter) for parameter in kernel.params}
    constants = {name: value for name, value in constants.items() if signature.get(name) == "constexpr"}
    constants |= {n: True for n, k in signature.items() if k == "constexpr" and n not in constants}
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return compile(ASTSource(kernel, signature, constants), target=target, options=options)


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_cards(capability, tmp_path, monkeypatch):
    """Every kernel with every option on, to machine code: the interpreter accepts more than the compiler does."""
    from hf_hybrid_ssm.ops.causal_conv import triton as convolution
    from hf_hybrid_ssm.ops.causal_conv import triton_kernels as convolution_kernels
    from hf_hybrid_ssm.ops.long_conv import triton as long_convolution
    from hf_hybrid_ssm.ops.long_conv import triton_kernels as long_kernels
    from hf_hybrid_ssm.ops.longhorn_scan import triton as scan
    from hf_hybrid_ssm.ops.longhorn_scan import triton_kernels as scan_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    forward, backward = (scan.tile_sizes(16, backward=is_backward) for is_backward in (False, True))
    kernels = {
        scan_kernels.forward_kernel: forward,
        scan_kernels.forward_summary_kernel: forward,
        scan_kernels.backward_kernel: backward,
        scan_kernels.backward_summary_kernel: backward,
        scan_kernels.chain_kernel: {"BLOCK": scan.CHAIN_BLOCK, "num_warps": 4},
        convolution_kernels.forward_kernel: {"K": 4, **convolution.TILE},
        convolution_kernels.weight_gradient_kernel: {"K": 4, **convolution.TILE},
        convolution_kernels.input_gradient_kernel: {"K": 4, **convolution.TILE},
        long_kernels.toeplitz_kernel: long_convolution.TILE,
    }
    for kernel, sizes in kernels.items():
        constants = {"T": scan.BLOCK} | sizes
        compiled = compile_for(kernel, capability, constants, num_warps=constants.pop("num_warps"))
        assert f".entry {kernel.__name__}" in compiled.asm["ptx"] and compiled.asm["cubin"]
