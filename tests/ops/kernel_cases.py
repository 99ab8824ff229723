"""Every Triton kernel as it is launched, compiled for a card that is not here; and the spills of its machine code."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

IN_INPUT_DTYPE = {"x", "beta_logit", "z", "k", "q", "u", "grad_o", "o", "dx", "dlogit", "dz", "dk", "dq"}
IN_INPUT_DTYPE |= {"grad_y", "y", "weight", "columns", "grad_columns", "rows", "drows", "parameters"}
IN_FLOAT32 = ("linear_scan", "long_conv")  # ops that convert what they are given before the launch
TYPES = {"seq_idx": "*i64", "lengths": "*i64", "pages": "*i64", "decay": "*fp64"}
NUMBER = r"L|size|\w+_(row|step)"  # the first of a kernel's numbers, which follow its pointers
ALIGNED = r"\w+_(row|step|filter|states|channels)|channels|padded|size|W"  # of the numbers: multiples of 16


def compile_for(kernel, capability: int, constants: dict, *, dtype: str = "bf16", **options):
    """The compiled kernel, its pointers and strides as aligned as those of whole tensors; needs no card."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = types(kernel, dtype)
    constants = {name: constants.get(name, True) for name, what in signature.items() if what == "constexpr"}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, what) in enumerate(signature.items())
        if what.startswith("*") or (what == "i32" and re.fullmatch(ALIGNED, name))
    }
    target = GPUTarget("cuda", capability, 32)
    options = {"enable_fp_fusion": True, **options}
    return compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)


def types(kernel, dtype: str) -> dict[str, str]:
    """The type of each parameter of a kernel: pointers come first, then numbers, then constants."""
    inputs = () if kernel.fn.__module__.split(".")[-2] in IN_FLOAT32 else IN_INPUT_DTYPE
    found, pointer = {}, True
    for parameter in kernel.params:
        name = parameter.name
        pointer = pointer and not re.fullmatch(NUMBER, name)
        found[name] = TYPES.get(name, f"*{dtype}" if name in inputs else "*fp32") if pointer else "i32"
        if parameter.is_constexpr:
            found[name] = "constexpr"
    return found


def kernels_of(module: ModuleType) -> dict:
    """The kernels of a module that are its own, by name."""
    found = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    return {name: kernel for name, kernel in found.items() if kernel.fn.__module__ == module.__name__}


def cases() -> Iterator[tuple[str, str, object, dict]]:
    """Op, shape class, kernel and constants, num_warps among them, of everything that is launched."""
    import torch

    from hf_hybrid_ssm.ops.causal_conv import triton as conv
    from hf_hybrid_ssm.ops.implicit_attention import triton as implicit
    from hf_hybrid_ssm.ops.implicit_attention import triton_kernels as implicit_kernels
    from hf_hybrid_ssm.ops.linear_scan import triton as linear
    from hf_hybrid_ssm.ops.linear_scan import triton_channel_kernels
    from hf_hybrid_ssm.ops.long_conv import triton as long_conv
    from hf_hybrid_ssm.ops.longhorn_scan import triton as scan
    from hf_hybrid_ssm.ops.longhorn_scan import (
        triton_backward_kernels,
        triton_chunk_kernels,
        triton_chunk_summary_kernels,
        triton_kernels,
        triton_sizes,
    )
    from hf_hybrid_ssm.ops.longhorn_scan import triton_step as scan_step
    from hf_hybrid_ssm.ops.longhorn_scan import triton_step_kernels as scan_step_kernels

    plain = {"HAS_DOCUMENTS": False, "WIDTH": triton_sizes.WIDTH}
    shared = {"T": scan.SHARED_TOKENS, "BN": 16, "num_warps": 4}
    others = {
        "prepare_kernel": shared,
        "finish_kernel": shared,
        "chain_kernel": {"BLOCK": scan.CHAIN_BLOCK, "num_warps": 4},
    }
    for states in (16, 32, 64):
        for module, backward in ((triton_kernels, False), (triton_backward_kernels, True)):
            for name, kernel in kernels_of(module).items():
                sizes = others.get(name) or triton_sizes.tile_sizes(states, backward=backward)
                if name not in others:
                    yield "longhorn_scan", f"N={states}", kernel, plain | sizes
                elif states == 16:
                    yield "longhorn_scan", "", kernel, plain | sizes | {"HAS_DOCUMENTS": True}
        if chunks := triton_sizes.chunk_sizes(states, "torch.bfloat16"):
            for module in (triton_chunk_kernels, triton_chunk_summary_kernels):
                for kernel in kernels_of(module).values():
                    yield "longhorn_scan", f"N={states}", kernel, plain | chunks
        for kernel in kernels_of(scan_step_kernels).values():
            yield "longhorn_step", f"N={states}", kernel, scan_step.tile_sizes(states)
    for kernel in kernels_of(conv).values():
        tile = {conv.forward_kernel: conv.TILE, conv.backward_kernel: conv.BACKWARD_TILE}.get(kernel, conv.STEP_TILE)
        op = "causal_conv_step" if kernel is conv.step_kernel else "causal_conv"
        yield op, "K=4", kernel, {"K": 4, **tile}
    for inputs, precision in (("float32", "tf32x3"), ("bfloat16", "tf32")):
        yield "long_conv", inputs, long_conv.toeplitz_kernel, long_conv.TILE | {"PRECISION": precision}
    for states in (8, 16, 32):
        for kernel in kernels_of(triton_channel_kernels).values():
            yield "linear_scan", f"N={states}", kernel, linear.channel_tile(states)
    yield "linear_scan", "", linear.diagonal_kernel, dict(linear.DIAGONAL_TILE)
    for order, rows in ((50, 5), (220, 22)):
        for name, kernel in kernels_of(implicit_kernels).items():
            sizes = implicit.attention_tile(rows, torch.bfloat16) | {"SCALE": 1.0}
            sizes = implicit.memory_tile(order) if name.startswith("memory") else sizes
            yield "implicit_attention", f"q={order}, q'={rows}", kernel, sizes | {"C": implicit.BLOCK}


def tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def spills_in_inner_loops(compiled) -> int:
    """Instructions that bring a register to memory and back, in loops without loops inside them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = {"capture_output": True, "text": True, "check": True}
        text = subprocess.run([tool("nvdisasm"), "-c", file.name], **run).stdout
    return spills_of(text)


def spills_of(text: str) -> int:
    labels, instructions = {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found[1].strip())
    body = instructions.index("EXIT") if "EXIT" in instructions else len(instructions)
    loops = []
    for here, instruction in enumerate(instructions[:body]):  # after it are only what waits, and jumps back
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction)
        there = labels.get(target[1], here) if target else here
        if here - there > 7:
            loops.append((there, here + 1))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return sum(_is_local(each) for start, end in inner for each in instructions[start:end])


def _is_local(instruction: str) -> bool:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0] in ("LDL", "STL")
