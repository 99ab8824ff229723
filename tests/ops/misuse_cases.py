"""Calls that say what no op can do, or say it oddly: each is refused by every backend alike, or gives what is right.

A row is a call of the backend's name, and either the error with what it says, or another call that means the same. The
calls write to nothing that they share.
"""

from collections.abc import Callable
from typing import Any

import torch

from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition
from hf_hybrid_ssm.ops.local_attention import AttentionState
from tests.row_options import (
    causal_conv,
    causal_conv_of_token,
    implicit_attention,
    local_attention,
    longhorn_scan,
    longhorn_scan_of_token,
    lti_scan,
    slots_token,
    systems_token,
)

Call = Callable[[str], Any]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- calls: everything that is not said is right ----------------------------------------------------------------------


def scan(form: str = "real", **changed: Any) -> Call:
    """Two filters of sixteen channels and eight states."""
    given = {"decay": 0.1 * draw(2, 16, 8), "vector": draw(2, 16, 8, seed=1), "output": draw(2, 16, 8, seed=2)}
    if form == "complex":
        given["decay"] = 0.1 * draw(2, 16, 4, 2)
    options = {name: changed.pop(name) for name in ("skip", "initial_state", "lengths") if name in changed}
    decay, vector, output = (given | changed).values()
    system = ChannelSystem(Transition(decay, form), vector, output)
    u = draw(2, 40, 16, seed=3)
    return lambda backend: lti_scan(u, system, **options, return_final_state=True, backend=backend)


def token(q=None, k=None, keys=None, values=None, seen=None, drops_token=False, **options: Any) -> Call:
    """A step of two rows, four heads on two of keys, five slots."""
    q, k = draw(2, 4, 6) if q is None else q, draw(2, 2, 6, seed=1) if k is None else k
    keys = draw(2, k.shape[1], 5, 6, seed=2) if keys is None else keys
    values = draw(2, k.shape[1], keys.shape[2], 3, seed=3) if values is None else values
    seen = torch.tensor([2, 9]) if seen is None else seen
    options = {"window": (4, 0)} | options

    def run(backend: str):
        v = draw(2, k.shape[1], 3, seed=4)
        own = (None, None) if drops_token else (k, v)
        held = [part.clone() if part.is_contiguous() and part.is_cpu else part for part in (keys, values)]
        y = slots_token(q, *own, *held, seen, **options, backend=backend)
        return y, *held

    return run


def rows(**options: Any) -> Call:
    q, k, v = draw(2, 4, 12, 6), draw(2, 2, 12, 6, seed=1), draw(2, 2, 12, 3, seed=2)
    options = {"window": (4, 0)} | options
    return lambda backend: local_attention(q, k, v, **options, backend=backend)[0]


def held(seen: torch.Tensor) -> AttentionState:
    return AttentionState(draw(2, 2, 4, 6, seed=5), draw(2, 2, 4, 3, seed=6), seen)


def convolution(**changed: Any) -> Call:
    given = {"weight": draw(16, 4), "bias": draw(16, seed=1), "initial_state": draw(2, 3, 16, seed=2)} | changed
    return lambda backend: causal_conv(draw(2, 12, 16, seed=3), **given, return_final_state=True, backend=backend)


def convolution_step(state: torch.Tensor) -> Call:
    return lambda backend: causal_conv_of_token(draw(2, 16), state, draw(16, 4, seed=1), backend=backend)


def longhorn(**options: Any) -> Call:
    inputs = (draw(2, 12, 16), draw(2, 12, 16, seed=1), draw(2, 12, 8, seed=2), draw(2, 12, 8, seed=3))
    return lambda backend: longhorn_scan(*inputs, **options, return_final_state=True, backend=backend)


def longhorn_token(state: torch.Tensor) -> Call:
    inputs = (draw(2, 16), draw(2, 16, seed=1), draw(2, 8, seed=2), draw(2, 8, seed=3))
    return lambda backend: longhorn_scan_of_token(*inputs, state, backend=backend)


def system_token(states: int = 8, **options: Any) -> Call:
    constants = draw(1, 4, states, seed=1)
    options = {"output_rows": constants, "skip": draw(1, 4, seed=2)} | options

    def run(backend: str):
        state = draw(2, 1, 4, states, seed=3)
        return systems_token(draw(2, 4), state, constants, constants, **options, backend=backend), state

    return run


def implicit(**changed: Any) -> Call:
    given = {"weight": 0.3 * draw(3, 4, 6), "bias": draw(3, 4, seed=1), "collapse": draw(4, seed=2), "theta": 9.0}
    given |= changed
    return lambda backend: implicit_attention(
        draw(2, 12, 16, seed=3), **given, return_final_state=True, backend=backend
    )


# -- the table --------------------------------------------------------------------------------------------------------

BLOCK: dict[str, Any] = {"layout": "block", "window": (None, 0)}
BY_RANK: dict[str, Any] = {"layout": "by_rank", "window": (None, 0)}
META = torch.empty(0, device="meta")
ELSEWHERE = "must be on cpu like the other inputs, got meta"
VECTOR = draw(2, 16, 16, seed=1)[..., ::2]
DECAY = 0.1 * draw(8)
PAIRS = 0.1 * draw(2, 16, 4, 4)[..., ::2]
SHARED = draw(2, 1, 5, 6).expand(2, 2, 5, 6)

REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    "vector of one filter for two": (scan(vector=draw(1, 16, 8)), ValueError, "system.vector must have shape"),
    "vector of another size": (scan(vector=draw(2, 16, 6)), ValueError, "system.vector must have shape"),
    "decay of other channels": (scan(decay=draw(3, 8)), ValueError, "system.transition.value must have shape"),
    "decay of other states": (scan(decay=draw(4)), ValueError, "system.transition.value must have shape"),
    "a complex decay of odd states": (
        scan("complex", vector=draw(2, 16, 7), output=draw(2, 16, 7)), ValueError, "needs an even N, got 7"),
    "output of a rank": (scan(output=draw(16, 8)), ValueError, "system.output must have shape"),
    "a form without a name": (scan("imaginary"), ValueError, "form='imaginary' must be"),
    "decay elsewhere": (scan(decay=META.new_empty(2, 16, 8)), ValueError, "must be on cpu like output, got meta"),
    "vector elsewhere": (scan(vector=META.new_empty(2, 16, 8)), ValueError, ELSEWHERE),
    "skip elsewhere": (scan(skip=META.new_empty(2, 16)), ValueError, ELSEWHERE),
    "lengths beyond the row": (scan(lengths=torch.tensor([41, 3])), ValueError, r"lengths must lie in 0..40"),
    "no slot": (token(keys=draw(2, 2, 0, 6)), ValueError, "at least one slot"),
    "no slot of a block": (token(keys=draw(2, 2, 0, 6), **BLOCK), ValueError, "at least one slot"),
    "no heads of keys": (token(k=draw(2, 0, 6)), ValueError, "must have a multiple of the 0 heads"),
    "fewer tokens than none": (token(seen=torch.tensor([-1, 3])), ValueError, "seen must not be negative"),
    "fewer tokens of a block than none": (
        token(seen=torch.tensor([2, -3]), **BLOCK), ValueError, "seen must not be negative"),
    "tokens that are no whole numbers": (token(seen=torch.tensor([2.0, 3.0])), TypeError, "seen must be int32 or"),
    "tokens of one row for two": (token(seen=torch.tensor([2])), ValueError, "seen must have shape"),
    "bias of one head for four": (token(bias=draw(1, 5)), ValueError, r"bias must have shape \(H, R\) = \(4, any\)"),
    "bias of no distance": (token(bias=draw(4, 0)), ValueError, "at least one distance"),
    "bias of a block": (token(bias=draw(4, 5), **BLOCK), ValueError, "neither of a block"),
    "bias of fixed slots": (token(bias=draw(4, 5), drops_token=True), ValueError, "nor without k and v"),
    "a layout without a name": (token(layout="shift"), ValueError, "layout='shift' must be one of"),
    "a block without the token": (
        token(drops_token=True, **BLOCK), ValueError, "layout='block' is for a token that is kept"),
    "no slot for a token by rank": (
        token(seen=torch.tensor([2, 5]), **BY_RANK), ValueError, "seen must (be below 5|not be negative)"),
    "mask of a window": (token(mask=torch.ones(2, 5).bool()), ValueError, "mask is for slots alone"),
    "mask of other slots": (
        token(mask=torch.ones(2, 4).bool(), drops_token=True), ValueError, r"mask must have shape \(B, M\)"),
    "mask of numbers": (token(mask=torch.ones(2, 5), drops_token=True), TypeError, "mask must be bool"),
    "scale of one head for four": (token(head_scale=draw(1)), ValueError, "head_scale must have shape"),
    "keys whose entries lie apart": (token(keys=draw(2, 2, 5, 12)[..., ::2]), ValueError, "its last stride must be 1"),
    "keys that share memory": (token(keys=SHARED), ValueError, "must not share memory"),
    "zeros before all time": (token(window=(None, 0), zero_kv_sink=True), ValueError, "a window with a finite left"),
    "a value of no sink": (token(sink_values=draw(4, 3)), ValueError, "sink_values without sink_logits"),
    "two sinks": (token(zero_kv_sink=True, sink_logits=draw(2, 4)), ValueError, "are two sinks: give one"),
    "a sink of one row for two": (
        token(sink_logits=draw(1, 4)), ValueError, r"must have shape \(B, H, L\) = \(2, 4, 1\)"),
    "a sink of whole rows": (
        token(sink_logits=draw(2, 4, 12)), ValueError, r"sink_logits must have shape \(B, H, L\)"),
    "a sink's value for three heads of four": (
        token(sink_logits=draw(2, 4), sink_values=draw(3, 3)), ValueError, "a row for each of 4 or 2 heads, got 3"),
    "a sink's value of another size": (
        token(sink_logits=draw(2, 4), sink_values=draw(4, 6)), ValueError, "sink_values must have shape"),
    "a sink of whole numbers": (
        token(sink_logits=torch.ones(2, 4, dtype=torch.int64)), TypeError, "sink_logits must have a floating-point"),
    "a sink elsewhere": (token(sink_logits=META.new_empty(2, 4)), ValueError, f"sink_logits {ELSEWHERE}"),
    "a block that ends early": (token(window=(None, -2), layout="block"), ValueError, "right must be 0 or -1"),
    "a window in halves": (token(window=(1.5, 0)), TypeError, "window must hold whole numbers or None"),
    "a chunk of none": (token(chunk_size=0), ValueError, "chunk_size must be at least 1"),
    "keys elsewhere": (
        token(keys=META.new_empty(2, 2, 5, 6), values=META.new_empty(2, 2, 5, 3)), ValueError, ELSEWHERE),
    "rows: a window in halves": (rows(window=(1.5, 0)), TypeError, "window must hold whole numbers or None"),
    "rows: bias elsewhere": (rows(bias=META.new_empty(4, 5)), ValueError, ELSEWHERE),
    "rows: a value of no sink": (rows(sink_values=draw(4, 3)), ValueError, "sink_values without sink_logits"),
    "rows: two sinks": (
        rows(zero_kv_sink=True, sink_logits=draw(2, 4, 12)), ValueError, "are two sinks: give one of them"),
    "rows: a sink of a token": (rows(sink_logits=draw(2, 4)), ValueError, r"shape \(B, H, L\) = \(2, 4, 12\)"),
    "rows: a sink for the heads of keys": (
        rows(sink_logits=draw(2, 2, 12)), ValueError, "sink_logits must have shape"),
    "rows: a sink's value for each token": (
        rows(sink_logits=draw(2, 4, 12), sink_values=draw(12, 3)), ValueError, "each of 4 or 2 heads, got 12"),
    "rows: a sink's value elsewhere": (
        rows(sink_logits=draw(2, 4, 12), sink_values=META.new_empty(4, 3)), ValueError, f"sink_values {ELSEWHERE}"),
    "rows: bias of no distance": (rows(bias=draw(4, 0)), ValueError, "at least one distance"),
    "rows: a state of fewer tokens than none": (
        rows(initial_state=held(torch.tensor([3, -1]))), ValueError, "initial_state.seen must not be negative"),
    "rows: a state of halves": (rows(initial_state=held(torch.tensor([3.0, 1.0]))), TypeError, "must be int32 or int"),
    "convolution: weight elsewhere": (convolution(weight=META.new_empty(16, 4)), ValueError, f"weight {ELSEWHERE}"),
    "convolution: bias elsewhere": (convolution(bias=META.new_empty(16)), ValueError, f"bias {ELSEWHERE}"),
    "convolution: a state elsewhere": (
        convolution(initial_state=META.new_empty(2, 3, 16)), ValueError, f"initial_state {ELSEWHERE}"),
    "convolution step: a state transposed": (
        convolution_step(draw(2, 16, 3).mT), ValueError, "state is overwritten and must be contiguous"),
    "longhorn: skip elsewhere": (longhorn(D=META.new_empty(16)), ValueError, f"D {ELSEWHERE}"),
    "longhorn: a state elsewhere": (
        longhorn(initial_state=META.new_empty(2, 16, 8)), ValueError, f"initial_state {ELSEWHERE}"),
    "longhorn step: a state transposed": (
        longhorn_token(draw(2, 8, 16).mT), ValueError, "state is overwritten and must be contiguous"),
    "linear step: complex of odd states": (system_token(7, is_complex=True), ValueError, "an even number of real"),
    "linear step: one side": (system_token(low_rank=(draw(1, 4, 8), None)), ValueError, "give both or neither"),
    "implicit: weight elsewhere": (implicit(weight=META.new_empty(3, 4, 6)), ValueError, f"weight {ELSEWHERE}"),
    "implicit: collapse elsewhere": (implicit(collapse=META.new_empty(4)), ValueError, f"collapse {ELSEWHERE}"),
}  # fmt: skip

# what is odd, and what it means
MEANT: dict[str, tuple[Call, Call]] = {
    "decays that all channels share": (scan(decay=DECAY), scan(decay=DECAY.expand(2, 16, 8).contiguous())),
    "decays that filters share": (
        scan(decay=DECAY.expand(1, 16, 8)), scan(decay=DECAY.expand(2, 16, 8).contiguous())),
    "complex decays that all channels share": (
        scan("complex", decay=DECAY.view(4, 2)),
        scan("complex", decay=DECAY.view(4, 2).expand(2, 16, 4, 2).contiguous()),
    ),
    "vectors whose entries lie apart": (scan("complex", vector=VECTOR), scan("complex", vector=VECTOR.contiguous())),
    "pairs that lie apart": (scan("complex", decay=PAIRS), scan("complex", decay=PAIRS.contiguous())),
    "seen in int32": (token(seen=torch.tensor([2, 9], dtype=torch.int32)), token()),
    "a window beyond all numbers": (token(window=(2**63, 0)), token(window=(None, 0))),
    "rows: a window beyond all numbers": (rows(window=(2**63, 0)), rows(window=(None, 0))),
    "rows: a window that begins beyond them": (
        rows(window=(2**63, -(2**63))), lambda backend: torch.zeros(2, 4, 12, 3)),
    "rows: a sink for all tokens of a head": (
        rows(sink_logits=draw(4)[None, :, None].expand(2, 4, 12)),
        rows(sink_logits=draw(4)[None, :, None].repeat(2, 1, 12)),
    ),
    "a sink for all rows": (
        token(sink_logits=draw(4).expand(2, 4)), token(sink_logits=draw(4).expand(2, 4).contiguous())),
    "rows: a sink in float64": (
        rows(sink_logits=draw(2, 4, 12).double(), sink_values=draw(2, 3).double()),
        rows(sink_logits=draw(2, 4, 12), sink_values=draw(2, 3).repeat_interleave(2, 0)),
    ),
    "rows: a sink that is nowhere": (
        rows(sink_logits=torch.full((2, 4, 12), -torch.inf), sink_values=draw(4, 3)), rows()),
    "a sink that is nowhere": (token(sink_logits=torch.full((2, 4), -torch.inf), sink_values=draw(4, 3)), token()),
    "linear step: no states": (
        system_token(0),
        lambda backend: (draw(1, 4, seed=2) * draw(2, 4).unsqueeze(1), torch.zeros(2, 1, 4, 0)),
    ),
}  # fmt: skip


def _hides_all(is_step: bool, **options: Any) -> tuple[Call, Call]:
    """A bias of -inf at every distance: a token sees nothing, zeros before its document included."""
    bias = torch.full((4, 5), -torch.inf)
    if "sink_values" in options:
        options["sink_logits"] = torch.full((2, 4) if is_step else (2, 4, 12), -torch.inf)
    if is_step:
        seen, (_, *kept) = token(bias=bias, **options), token(**options)("reference")
        return seen, lambda backend: (torch.zeros(2, 4, 3), *kept)
    return rows(bias=bias, **options), lambda backend: torch.zeros(2, 4, 12, 3)


for _name, _options in {
    "": {},
    " and zeros": {"zero_kv_sink": True},
    " and zeros strictly before": {"window": (4, -1), "zero_kv_sink": True},
    " beside a sink that is nowhere": {"sink_values": draw(4, 3)},
}.items():
    MEANT[f"a bias that hides all{_name}"] = _hides_all(True, **_options)
    MEANT[f"rows: a bias that hides all{_name}"] = _hides_all(False, **_options)


def _fewer_slots() -> tuple[Call, Call]:
    """Zeros stand for what came before the document, not for what is held no more: nine tokens, four are held."""
    options = {"window": (12, 0), "zero_kv_sink": True}

    def by_hand(backend: str):
        q, keys, values = draw(2, 4, 6), draw(2, 2, 5, 6, seed=2), draw(2, 2, 5, 3, seed=3)
        keys[:, :, -1], values[:, :, -1] = draw(2, 2, 6, seed=1), draw(2, 2, 3, seed=4)
        y = torch.zeros(2, 4, 3)
        for row, seen in enumerate((2, 9)):
            for head in range(4):
                inside = slice(max(0, 4 - seen), 5)
                logits = keys[row, head // 2, inside] @ q[row, head] * 6**-0.5
                zeros = logits.new_zeros(12 - seen)
                weights = torch.cat([logits, zeros]).softmax(0)[: len(logits)]
                y[row, head] = weights @ values[row, head // 2, inside]
        return y, keys, values

    return token(**options), by_hand


MEANT["zeros, and fewer slots than the window"] = _fewer_slots()

# counts that nobody looked at, since their values could not be read: as those within the row
UNREAD: dict[str, Callable[[torch.Tensor], Call]] = {
    "lti_scan": lambda lengths: scan(lengths=lengths),
    "local_attention": lambda lengths: rows(lengths=lengths),
    "longhorn_scan": lambda lengths: longhorn(lengths=lengths),
    "causal_conv": lambda lengths: convolution(lengths=lengths),
    "implicit_attention": lambda lengths: implicit(lengths=lengths),
}
