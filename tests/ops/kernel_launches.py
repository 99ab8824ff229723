"""What launches every Triton kernel, forward and backward, all options on; run as a program it compiles all of it.

    python -m tests.ops.kernel_launches 90 16 64     for a card of capability 90, of 16 and 64 states

A line of JSON for each program that a launch asks for. Nothing runs, and nothing here was measured on a card.
"""

import json
import sys
from collections.abc import Callable, Iterator

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


def main(capability: int, states: set[str]) -> None:
    """Compile what is launched for a card that is not here; of a class without states all."""
    from benchmarks import absent_card
    from tests.ops.kernel_cases import spills_in_inner_loops

    asked = absent_card.install(capability)
    for dtype in DTYPES:
        for aligned in (True, False):
            for op, shape_class, launch in launches(Inputs(DTYPES[dtype], aligned=aligned)):
                if shape_class.startswith("N=") and shape_class.split(",")[0] not in states:
                    continue
                asked.clear()
                absent_card.forget()
                launch()
                for each in asked:
                    told = {"op": op, "class": shape_class, "dtype": dtype, "kernel": each.kernel.fn.__name__}
                    told |= {"aligned": aligned, "shared": each.program.metadata.shared}
                    fits = told["shared"] <= absent_card.SHARED[capability]
                    told["spills"] = spills_in_inner_loops(each.program) if fits else None
                    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), {f"N={number}" for number in sys.argv[2:]})
