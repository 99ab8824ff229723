"""Random calls of every op that has a C kernel: sizes that fill no vector, rows apart, documents, ragged rows.

`deviation` is the one comparison of all implementations with the float64 reference, gradients included.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from hf_hybrid_ssm.ops.implicit_attention.decoding import apply_deferred, defer_updates
from hf_hybrid_ssm.ops.implicit_attention.native import decode_token
from hf_hybrid_ssm.ops.implicit_attention.reference import ImplicitInputs
from hf_hybrid_ssm.ops.int8_product import int8_product
from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition
from hf_hybrid_ssm.ops.local_attention import AttentionState
from tests.row_options import (
    causal_conv,
    causal_conv_of_token,
    diagonal_scan,
    implicit_attention,
    local_attention,
    longhorn_scan,
    longhorn_scan_of_token,
    lti_scan,
    slots_token,
    systems_token,
)

Call = Callable[[str], Any]


class Drawn:
    """What one case is made of; the same seed draws the same."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, rounded: torch.dtype = torch.float32):
        """Numbers that `rounded` holds, as tensors of `dtype`."""
        self.random, self.generator = Random(seed), torch.Generator().manual_seed(seed)
        self.batch, self.leaves, self.dtype, self.rounded = self.random.randint(1, 3), [], dtype, rounded

    def size(self, largest: int, least: int = 1) -> int:
        """Most often small, sometimes a multiple of sixteen."""
        return self.random.choice(
            [self.random.randint(least, largest), max(least, self.random.randint(0, largest // 16) * 16)]
        )

    def chance(self, part: float = 0.5) -> bool:
        return self.random.random() < part

    def floats(self, *shape: int, leaf: bool = True, apart: bool = False) -> torch.Tensor:
        """Normal; with `apart`, rows of a longer tensor."""
        wide = (*shape[:-1], shape[-1] + self.random.randint(0, 3)) if apart else shape
        x = torch.randn(wide, generator=self.generator).to(self.rounded).to(self.dtype)[..., : shape[-1]]
        return self.leaf(x) if leaf else x

    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        """With a gradient, which is compared."""
        self.leaves.append(x.detach().requires_grad_())
        return self.leaves[-1]

    def optional(self, *shape: int) -> torch.Tensor | None:
        return self.floats(*shape) if self.chance() else None

    def sink(self, *shape: int, groups: int, width: int) -> dict[str, torch.Tensor | None]:
        """Logits of that shape (B, H, ...), some -inf, and perhaps values for each head or each head of keys."""
        logits = self.floats(*shape[:1], *shape[2:], shape[1]).movedim(-1, 1)
        absent = torch.rand(shape, generator=self.generator) < self.random.choice([0.0, 0.5])
        values = self.optional(self.random.choice([shape[1], groups]), width)
        return {"sink_logits": logits.masked_fill(absent, -torch.inf), "sink_values": values}

    def documents(self, length: int) -> torch.Tensor | None:
        if self.chance(0.6):
            return None
        steps = torch.rand(self.batch, length, generator=self.generator) < self.random.choice([0.05, 0.3])
        return steps.cumsum(1).to(self.random.choice([torch.int32, torch.int64]))

    def lengths(self, length: int) -> torch.Tensor | None:
        if self.chance(0.6):
            return None
        return torch.randint(0, length + 1, (self.batch,), generator=self.generator)


def _real(outputs: tuple, lengths: torch.Tensor | None) -> tuple:
    """Outputs (B, L, ...) of the real tokens, since those of others mean nothing, and the state."""
    y, state = outputs
    if lengths is not None:
        real = torch.arange(y.shape[1]) < lengths.unsqueeze(1)
        y = torch.where(real.view(*real.shape, *[1] * (y.dim() - 2)), y, 0.0)
    return y, state


def _channels_and_heads(drawn: Drawn) -> tuple[int, list[int]]:
    """Channels, and the heads among which they are shared out, if any."""
    if drawn.chance(0.7):
        return drawn.size(50), []
    heads = drawn.random.randint(1, 4)
    return heads * drawn.size(17), [heads]


def longhorn(drawn: Drawn) -> Call:
    batch, length, states = drawn.batch, drawn.size(70), drawn.size(20)
    width, heads = _channels_and_heads(drawn)
    rows = drawn.floats(batch, length, width, apart=True), drawn.floats(batch, length, width)
    keys = drawn.floats(batch, length, *heads, states), drawn.floats(batch, length, *heads, states, apart=True)
    options = {
        "beta_bias": drawn.optional(width),
        "D": drawn.optional(width),
        "z": drawn.optional(batch, length, width),
    }
    options |= {"initial_state": drawn.optional(batch, width, states), "seq_idx": drawn.documents(length)}
    options["lengths"] = None if options["seq_idx"] is not None else drawn.lengths(length)
    options["return_final_state"] = True
    return lambda backend: _real(longhorn_scan(*rows, *keys, **options, backend=backend), options["lengths"])


def longhorn_token(drawn: Drawn) -> Call:
    batch, states = drawn.batch, drawn.size(40)
    width, heads = _channels_and_heads(drawn)
    shapes = [(width,), (width,), (*heads, states), (*heads, states)]
    rows = [drawn.floats(batch, *shape, leaf=False, apart=True) for shape in shapes]
    options = {"D": drawn.optional(width), "z": drawn.optional(batch, width), "beta_bias": drawn.optional(width)}
    state = drawn.floats(batch, width, states, leaf=False)

    def run(backend: str):
        after = state.clone()
        return longhorn_scan_of_token(*rows, after, **options, backend=backend), after

    return run


def convolution(drawn: Drawn) -> Call:
    batch, length, width, taps = drawn.batch, drawn.size(150), drawn.size(50), drawn.size(6)
    x, weight, bias = drawn.floats(batch, length, width, apart=True), drawn.floats(width, taps), drawn.optional(width)
    options = {
        "activation": drawn.random.choice([None, "silu"]),
        "initial_state": drawn.optional(batch, taps - 1, width),
    }
    options |= {"seq_idx": drawn.documents(length), "lengths": drawn.lengths(length), "return_final_state": True}
    return lambda backend: _real(causal_conv(x, weight, bias, **options, backend=backend), options["lengths"])


def convolution_token(drawn: Drawn) -> Call:
    batch, width, taps = drawn.batch, drawn.size(50), drawn.size(6)
    x, weight = drawn.floats(batch, width, leaf=False, apart=True), drawn.floats(width, taps, leaf=False)
    state = drawn.floats(batch, taps - 1, width, leaf=False)
    options = {"bias": drawn.optional(width), "activation": drawn.random.choice([None, "silu"])}

    def run(backend: str):
        after = state.clone()
        return causal_conv_of_token(x, after, weight, **options, backend=backend), after

    return run


def _decays(drawn: Drawn, *shape: int, is_complex: bool) -> torch.Tensor:
    size = torch.sigmoid(3 + 2 * drawn.floats(*shape, leaf=False))
    if not is_complex:
        return drawn.leaf(size)
    return drawn.leaf(torch.view_as_real(torch.polar(size, 3 * drawn.floats(*shape, leaf=False))))


def system(drawn: Drawn) -> Call:
    filters, length, width, is_complex = drawn.random.randint(1, 3), drawn.size(90), drawn.size(40), drawn.chance()
    states = 2 * drawn.size(8) if is_complex else drawn.size(12)
    decay = _decays(drawn, filters, width, states // 2 if is_complex else states, is_complex=is_complex)
    transition = Transition(decay, "complex" if is_complex else "real")
    rows = ChannelSystem(transition, drawn.floats(filters, width, states), drawn.floats(filters, width, states))
    u = drawn.floats(drawn.batch, length, width, apart=True)
    options = {"skip": drawn.optional(filters, width), "seq_idx": drawn.documents(length)}
    options |= {"initial_state": drawn.optional(drawn.batch, filters, width, states), "lengths": drawn.lengths(length)}
    options["return_final_state"] = True
    return lambda backend: _real(lti_scan(u, rows, **options, backend=backend), options["lengths"])


def states_of_diagonal(drawn: Drawn) -> Call:
    length, width, is_complex = drawn.size(90), drawn.size(90), drawn.chance()
    decay = _decays(drawn, width, is_complex=is_complex)
    pairs = (2,) if is_complex else ()
    x, start = drawn.floats(drawn.batch, length, width, *pairs), drawn.optional(drawn.batch, width, *pairs)
    documents = drawn.documents(length)

    def run(backend: str):
        a, inputs, state = (
            torch.view_as_complex(part) if is_complex and part is not None else part for part in (decay, x, start)
        )
        h, _ = diagonal_scan(a, inputs, initial_state=state, seq_idx=documents, backend=backend)
        return torch.view_as_real(h) if is_complex else h

    return run


def system_token(drawn: Drawn) -> Call:
    filters, width, is_complex = drawn.random.randint(1, 3), drawn.size(12), drawn.chance()
    states = 2 * drawn.size(20) if is_complex else drawn.size(40)
    shape = filters, width, states
    change, vector, rows, left, right = (0.3 * drawn.floats(*shape, leaf=False) for _ in range(5))
    u, state = drawn.floats(drawn.batch, width, leaf=False), drawn.floats(drawn.batch, *shape, leaf=False)
    options = {"low_rank": (left, right) if drawn.chance() else None, "is_complex": is_complex, "silu": drawn.chance()}
    options |= {"output_rows": rows if drawn.chance(0.8) else None, "skip": drawn.optional(filters, width)}

    def run(backend: str):
        after = state.clone()
        y = systems_token(u, after, change, vector, **options, backend=backend)
        return after if y is None else (y, after)

    return run


def _heads(drawn: Drawn) -> tuple[int, int, int, int]:
    """Heads, heads of keys, entries of keys and of values."""
    groups = drawn.random.randint(1, 3)
    return groups * drawn.random.randint(1, 3), groups, drawn.size(40), drawn.size(40)


def attention(drawn: Drawn) -> Call:
    (heads, groups, size, width), length = _heads(drawn), drawn.random.choice([drawn.size(20), drawn.size(150)])
    q = drawn.floats(drawn.batch, length, heads, size, apart=True).transpose(1, 2)
    k, v = (
        drawn.floats(drawn.batch, groups, length, size),
        drawn.floats(drawn.batch, groups, length, width, apart=True),
    )
    left = drawn.random.choice([None, 0, drawn.size(30), drawn.size(300)])
    right = drawn.random.choice([0, 0, -1, 2, None])
    if left is not None and right is not None:
        right = max(right, -left)
    causal = right is not None and right <= 0
    options: dict[str, Any] = {"window": (left, right), "chunk_size": drawn.random.choice([None, drawn.size(40)])}
    options |= {"seq_idx": drawn.documents(length), "lengths": drawn.lengths(length)}
    options["softcap"] = drawn.random.choice([None, None, None, 0.6])
    columns = drawn.size(30)
    options["bias"] = drawn.optional(heads, columns if causal else 2 * columns + 1)
    options["zero_kv_sink"] = causal and left is not None and options["chunk_size"] is None and drawn.chance()
    if not options["zero_kv_sink"] and drawn.chance():
        options |= drawn.sink(drawn.batch, heads, length, groups=groups, width=width)
    if causal and drawn.chance():
        slots = drawn.size(20, 0) if left is None else left
        slots = max(slots, options["chunk_size"] or 0)
        keys, values = (drawn.floats(drawn.batch, groups, slots, e, leaf=False) for e in (size, width))
        seen = torch.randint(0, 2 * slots + 2, (drawn.batch,), generator=drawn.generator)
        options["initial_state"] = AttentionState(keys, values, seen if left is not None else seen.clamp(max=slots))
    lengths = options["lengths"]

    def run(backend: str):
        y, _ = local_attention(q, k, v, **options, backend=backend)
        return _real((y.transpose(1, 2), None), lengths)

    return run


def attention_token(drawn: Drawn) -> Call:
    (heads, groups, size, width), slots = _heads(drawn), drawn.size(400 if drawn.chance(0.2) else 40)
    q, k, v = (
        drawn.floats(drawn.batch, h, e, leaf=False, apart=True)
        for h, e in ((heads, size), (groups, size), (groups, width))
    )
    keys, values = (drawn.floats(drawn.batch, slots + 1, groups, e, leaf=False).transpose(1, 2) for e in (size, width))
    seen = torch.randint(0, 3 * slots, (drawn.batch,), generator=drawn.generator)
    kind = drawn.random.choice(["block", "window", "window", "fixed"])
    options: dict[str, Any] = {"head_scale": drawn.optional(heads)}
    if kind == "block":
        options |= {"layout": "block", "window": (None, drawn.random.choice([0, -1]))}
    elif kind == "window":
        left = drawn.random.choice([None, drawn.size(slots, 0)])
        options["window"] = (left, drawn.random.choice([0, -1]) if left else 0)
        options["chunk_size"] = drawn.random.choice([None, drawn.size(20)])
        layout = drawn.random.choice(["free", "by_rank"])
        options |= {"bias": drawn.optional(heads, drawn.size(20)), "layout": layout}
        seen = seen.clamp(max=slots) if layout == "by_rank" and left is None else seen
        options["zero_kv_sink"] = left is not None and options["chunk_size"] is None and drawn.chance()
    elif drawn.chance():
        shown = torch.rand(drawn.batch, slots + 1, generator=drawn.generator)
        options["mask"] = shown < drawn.random.choice([0.0, 0.1, 0.9, 1.0])
    if not options.get("zero_kv_sink") and drawn.chance():
        options |= drawn.sink(drawn.batch, heads, groups=groups, width=width)

    def run(backend: str):
        held = [part.clone(memory_format=torch.preserve_format) for part in (keys, values)]
        own = (None, None) if kind == "fixed" else (k, v)
        return slots_token(q, *own, *held, seen, **options, backend=backend), *held

    return run


def implicit(drawn: Drawn) -> Call:
    rows, order, length, width = drawn.size(10), drawn.size(12), drawn.size(100), drawn.size(50)
    weight, collapse = drawn.floats(3, rows, order), drawn.floats(rows)
    options = {
        "bias": drawn.optional(3, rows),
        "collapse_bias": drawn.optional(1),
        "theta": drawn.random.uniform(3, 40),
    }
    options |= {"scale": drawn.random.uniform(0.1, 1), "lengths": drawn.lengths(length)}
    x, lengths = drawn.floats(drawn.batch, length, width, apart=True), options["lengths"]

    def run(backend: str):
        form = "recurrent" if backend == "reference" else "fft"
        options["return_final_state"] = True
        return _real(implicit_attention(x, weight, collapse=collapse, **options, form=form, backend=backend), lengths)

    return run


def implicit_token(drawn: Drawn) -> Call:
    """Some tokens after a memory, through the block in which it stays where it is."""
    rows, order, width, theta = drawn.size(10), drawn.size(12), drawn.size(50), drawn.random.uniform(5, 40)
    weight, collapse = drawn.floats(3, rows, order, leaf=False), drawn.floats(rows, leaf=False)
    x, memory = drawn.floats(drawn.batch, drawn.size(80), width, leaf=False), drawn.floats(drawn.batch, order, width)
    memory, bias = memory.detach(), drawn.floats(3, rows, leaf=False)

    def run(backend: str):
        if backend != "native":
            options = {"theta": theta, "initial_state": memory, "return_final_state": True, "backend": backend}
            return implicit_attention(x, weight, bias, collapse, form="recurrent", **options)
        states, outputs = defer_updates(memory), []
        for t in range(x.shape[1]):
            token = ImplicitInputs(x[:, t : t + 1], weight, bias, collapse, None, theta=theta, scale=1.0)
            y, states = decode_token(token, states)
            outputs.append(y)
        return torch.cat(outputs, 1), apply_deferred(states, theta)

    return run


def int8_token(drawn: Drawn) -> Call:
    columns, outputs = drawn.size(200), drawn.size(40)
    x, scales = drawn.floats(drawn.size(9), columns, leaf=False), drawn.floats(outputs, leaf=False) / 1000
    codes = torch.randint(-128, 128, (outputs, columns), generator=drawn.generator).to(torch.int8)
    return lambda backend: int8_product(x, codes, scales, backend=backend)


CASES: dict[str, Callable[[Drawn], Call]] = {
    case.__name__: case
    for case in (
        longhorn, longhorn_token, convolution, convolution_token, system, states_of_diagonal, system_token, attention,
        attention_token, implicit, implicit_token, int8_token,
    )
}  # fmt: skip


CANCELLING = ("attention", "implicit")
"""Ops whose gradients cancel: those of keys that all get the same are zero but for rounding."""


def deviation(name: str, seed: int, implementation: str = "native", dtype: torch.dtype = torch.float32) -> float:
    """How far outputs and gradients in `dtype` are from the reference's in float64, relative to the largest of each.

    What is below a hundredth counts as a hundredth. In attention, whose gradients cancel (those of a query that sees
    one key are zero but for rounding), what is below a hundredth of the case's largest counts as that.
    """
    found = []
    for backend, given in ((implementation, dtype), ("reference", torch.float64)):
        drawn = Drawn(seed, given, dtype)
        with torch.set_grad_enabled(not name.endswith("_token")):
            outputs = CASES[name](drawn)(backend)
        outputs = [part for part in (outputs if isinstance(outputs, tuple) else (outputs,)) if part is not None]
        weights = torch.Generator().manual_seed(seed)
        loss = sum((part * torch.randn(part.shape, generator=weights).to(part.dtype)).sum() for part in outputs)
        leaves = () if name.endswith("_token") else tuple(drawn.leaves)  # steps have no gradients
        gradients = leaves
        if leaves and isinstance(loss, torch.Tensor) and loss.requires_grad:
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        elif leaves:
            gradients = tuple(torch.zeros_like(leaf) for leaf in leaves)
        found.append([part.detach().double() for part in (*outputs, *gradients)])
    worst, largest = 0.0, max((float(part.abs().max()) for part in found[1] if part.numel()), default=0.0)
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape and not got.isnan().any(), (name, seed)
        if want.numel():
            scale = want.abs().max().clamp(min=1e-2 * (max(1.0, largest) if name in CANCELLING else 1.0))
            worst = max(worst, float((got - want).abs().max() / scale))
    return worst
