"""What launches every Triton kernel, forward and backward, all options on; run as a program it compiles all of it.

    python -m tests.ops.kernel_launches 90 16 64     for a card of capability 90, of 16 and 64 states

A line of JSON for each program that a launch asks for. Nothing runs, and nothing here was measured on a card.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

STATES = (16, 32, 64, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ORDERS = ((50, 5), (220, 22))  # of memories, with the rows of their attention
LENGTH = 512  # two splits of a row
Launch = Callable[[], None]


class Inputs:
    """Draws tensors of one kind: rows that begin at multiples of 16 bytes with strides of 16, or rows that do not."""

    def __init__(self, dtype: torch.dtype, *, aligned: bool):
        self.dtype, self.aligned = dtype, aligned
        self.channels = 48 if aligned else 51

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.dtype
        if self.aligned:
            return torch.zeros(shape, dtype=dtype).requires_grad_()
        wide = torch.zeros(*shape[:-1], shape[-1] + 2, dtype=dtype)
        return wide[..., 1:-1].requires_grad_()


def launches(inputs: Inputs) -> Iterator[tuple[str, str, Launch]]:
    """Op, shape class and what launches it, forward and backward."""
    for states in STATES:
        yield "longhorn_scan", f"N={states}", lambda n=states: scan(inputs, n)
        yield "longhorn_step", f"N={states}", lambda n=states: step(inputs, n)
    for taps in (2, 4):
        yield "causal_conv", f"K={taps}", lambda k=taps: short_convolution(inputs, k)
        yield "causal_conv_step", f"K={taps}", lambda k=taps: short_step(inputs, k)
    yield "long_conv", "", lambda: long_convolution(inputs)
    for order, rows in ORDERS:
        yield "implicit_attention", f"q={order}, q'={rows}", lambda q=order, r=rows: memories(inputs, q, r)
    if inputs.dtype == torch.float32:  # these ops convert what they are given
        for form in ("real", "complex"):
            for states in STATES:
                yield "lti_scan", f"N={states}, {form}", lambda n=states, f=form: systems(inputs, n, f)
            yield "diagonal_scan", form, lambda f=form: diagonal(inputs, f)


def scan(inputs: Inputs, states: int) -> None:
    from hf_hybrid_ssm.ops.core.rows import Rows
    from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

    d = inputs.channels
    x, logit, z = (inputs(1, LENGTH, d) for _ in range(3))
    k, q = (inputs(1, LENGTH, states) for _ in range(2))
    bias, skip = (inputs(d, dtype=torch.float32) for _ in range(2))
    state = inputs(1, d, states, dtype=torch.float32)
    rows = Rows.of(seq_idx=torch.zeros(1, LENGTH, dtype=torch.long), return_final_state=True)
    options = {"beta_bias": bias, "D": skip, "z": z, "rows": rows, "initial_state": state}
    y, final = longhorn_scan(x, logit, k, q, **options)
    (y.sum() + final.sum()).backward()


def step(inputs: Inputs, states: int) -> None:
    from hf_hybrid_ssm.ops.core.pages import PagedState
    from hf_hybrid_ssm.ops.core.rows import Rows
    from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

    d = inputs.channels
    x, logit, z = (inputs(2, 1, d).detach() for _ in range(3))
    k, q = (inputs(2, 1, states).detach() for _ in range(2))
    bias, skip = (torch.zeros(d) for _ in range(2))
    options = {"beta_bias": bias, "D": skip, "z": z, "rows": Rows(is_step=True, overwrites_states=True)}
    for state in (torch.zeros(2, d, states), PagedState(torch.zeros(4, d, states), torch.arange(2))):
        longhorn_scan(x, logit, k, q, initial_state=state, **options)


def short_convolution(inputs: Inputs, taps: int) -> None:
    from hf_hybrid_ssm.ops.causal_conv import causal_conv
    from hf_hybrid_ssm.ops.core.rows import Rows

    d = inputs.channels
    rows = Rows.of(seq_idx=torch.zeros(2, LENGTH, dtype=torch.long), return_final_state=True)
    options = {"activation": "silu", "rows": rows, "initial_state": inputs(2, taps - 1, d)}
    y, _ = causal_conv(inputs(2, LENGTH, d), inputs(d, taps), inputs(d), **options)
    y.sum().backward()


def short_step(inputs: Inputs, taps: int) -> None:
    from hf_hybrid_ssm.ops.causal_conv import causal_conv
    from hf_hybrid_ssm.ops.core.rows import Rows

    d = inputs.channels
    weight, bias = torch.zeros(d, taps, dtype=inputs.dtype), torch.zeros(d, dtype=inputs.dtype)
    state = torch.zeros(2, taps - 1, d, dtype=inputs.dtype)
    rows = Rows(is_step=True, overwrites_states=True)
    causal_conv(inputs(2, 1, d).detach(), weight, bias, activation="silu", rows=rows, initial_state=state)


def long_convolution(inputs: Inputs) -> None:
    from hf_hybrid_ssm.ops.long_conv import long_conv

    length = LENGTH if inputs.aligned else LENGTH - 3  # rows of the kernel are dense: their length aligns them
    long_conv(inputs(2, length, 8), inputs(8, length, dtype=torch.float32))[0].float().sum().backward()


def memories(inputs: Inputs, order: int, rows: int) -> None:
    from hf_hybrid_ssm.ops.core.rows import Rows
    from hf_hybrid_ssm.ops.implicit_attention import implicit_attention

    d = inputs.channels
    weight, bias, collapse = (inputs(*shape, dtype=torch.float32) for shape in ((3, rows, order), (3, rows), (rows,)))
    state = inputs(2, order, d, dtype=torch.float32)
    options = {"theta": 2.0 * order, "scale": 0.1, "initial_state": state, "rows": Rows(return_final_state=True)}
    y, _ = implicit_attention(inputs(2, LENGTH, d), weight, bias, collapse, torch.zeros(1), **options)
    y.float().sum().backward()


def systems(inputs: Inputs, states: int, form: str) -> None:
    from hf_hybrid_ssm.ops.core.rows import Rows
    from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition, lti_scan

    d = inputs.channels
    shape = (1, d, states) if form == "real" else (1, d, states // 2, 2)
    decay = torch.full(shape, 0.5, dtype=torch.float64).requires_grad_()
    system = ChannelSystem(Transition(decay, form), *(inputs(1, d, states) for _ in range(2)))
    options = {"skip": inputs(1, d), "initial_state": inputs(2, 1, d, states)}
    documents = {"seq_idx": torch.zeros(2, LENGTH, dtype=torch.long), "lengths": torch.full((2,), LENGTH)}
    rows = Rows.of(**documents, return_final_state=True)
    y, final = lti_scan(inputs(2, LENGTH, d), system, rows=rows, **options)
    (y.sum() + final.sum()).backward()


def diagonal(inputs: Inputs, form: str) -> None:
    from hf_hybrid_ssm.ops.core.rows import Rows
    from hf_hybrid_ssm.ops.linear_scan import diagonal_scan

    number, wide = (torch.float32, torch.float64) if form == "real" else (torch.complex64, torch.complex128)
    decay = torch.full((inputs.channels,), 0.5, dtype=wide).requires_grad_()
    x, start = (inputs(*shape, inputs.channels, dtype=number) for shape in ((2, LENGTH), (2,)))
    rows = Rows.of(seq_idx=torch.zeros(2, LENGTH, dtype=torch.long))
    diagonal_scan(decay, x, rows=rows, initial_state=start)[0].abs().sum().backward()


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


def multiplied_in_32_bits(text: str, *, tiles: bool) -> list[str]:
    """Products with a stride over tokens: 300,000 tokens of 4,096 numbers are more than 2^31.

    `tiles` lets those pass whose tokens are counted from a tile's beginning, which are tensors.
    """
    strides = set(re.findall(r"%\w+_step\b", text))
    strides |= {found[1] for found in re.finditer(r"(%\S+) = tt\.splat %\w+_step\b[^\n]*: i32 ->", text)}
    products = re.findall(r"arith\.muli (%\S+), (%\S+) : (\S+)", text)
    narrow = [line for line in products if "i32" in line[2] and strides & set(line[:2])]
    return [line for line in narrow if not (tiles and line[2].startswith("tensor"))]


def main(capability: int, states: list[str]) -> None:
    """Compile what is launched for a card that is not here, of a class without states all; of several numbers of
    states the first in every form, the others in bfloat16 and of aligned rows alone, unless all are asked for."""
    from benchmarks import absent_card

    asked, wanted = absent_card.install(capability), [f"N={number}" for number in states]
    for dtype in DTYPES:
        for aligned in (True, False):
            usual = dtype == "bfloat16" and aligned
            of_states = wanted if usual or len(wanted) == len(STATES) else wanted[:1]
            for op, shape_class, launch in launches(Inputs(DTYPES[dtype], aligned=aligned)):
                if shape_class.startswith("N=") and shape_class.split(",")[0] not in of_states:
                    continue
                asked.clear()
                absent_card.forget()
                launch()
                for each in asked:
                    function, program = each.kernel.fn, each.program
                    told = {"op": op, "class": shape_class, "dtype": dtype, "kernel": function.__name__}
                    told |= {"aligned": aligned, "shared": program.metadata.shared, "module": function.__module__}
                    tiles = "longhorn_scan" in function.__module__
                    told["narrow"] = multiplied_in_32_bits(program.asm["ttir"], tiles=tiles)
                    fits = told["shared"] <= absent_card.SHARED[capability]
                    told["spills"] = spills_in_inner_loops(program) if fits else None
                    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
