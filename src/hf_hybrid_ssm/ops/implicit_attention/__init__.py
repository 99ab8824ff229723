"""Implicit self-attention: attention among the polynomial coefficients of one token's memory."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.packed_sequences import run_by_document
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows, is_one_token
from hf_hybrid_ssm.ops.implicit_attention.decoding import (
    DeferredMemory,
    apply_deferred,
    decoder,
    defer_updates,
    memory_state,
    named_memory,
)
from hf_hybrid_ssm.ops.implicit_attention.reference import EXAMPLES, ImplicitInputs, implicit_attention_reference
from hf_hybrid_ssm.ops.implicit_attention.torch_backend import implicit_attention_torch
from hf_hybrid_ssm.ops.legendre_memory import check_memory

_OP = Op(
    "implicit_attention",
    builtin={"torch": implicit_attention_torch, "reference": implicit_attention_reference},
    kernels={
        "native": "hf_hybrid_ssm.ops.implicit_attention.native",
        "triton": "hf_hybrid_ssm.ops.implicit_attention.triton",
    },
    examples=EXAMPLES,
)
FORMS = ("auto", "chunked", "fft", "recurrent")


def implicit_attention(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    collapse: torch.Tensor,
    collapse_bias: torch.Tensor | None = None,
    *,
    theta: float,
    activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
    scale: float = 1.0,
    form: str = "auto",
    rows: Rows = PLAIN_ROWS,
    initial_state: torch.Tensor | DeferredMemory | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | DeferredMemory | None]:
    r"""Q, K, V = act(L_i M_t + b_i), y_t = p softmax(scale · Q K^T) V + b, with the Legendre memory M_t (q, D) of x.

    Equations 8 to 11 of arXiv 2110.02402. All that follows the memory is local to a token.

    Args:
        x: (B, L, D).
        weight: (3, q', q), the reductions L_1, L_2, L_3 of the memory's order q.
        bias: (3, q') or None.
        collapse: p, (q',).
        collapse_bias: (1,) or None.
        theta: the memory's window, in tokens.
        activation: of queries, keys and values.
        scale: of the logits; 1 in the paper.
        form: "chunked" (blocks of matrix products), "fft" (the paper's; with an initial state, blocks instead)
            or "recurrent"; "auto" takes the faster of the first two, "fft" with the C kernel and "chunked" without.
            All compute the same, but "fft" to rounding: it does not multiply the future by exact zeros.
        rows, initial_state, backend: as for `ops.legendre_memory.legendre_memory`. The state may be a
            `DeferredMemory`, for which the C kernel has a step; the final state then is one too.

    Returns:
        y (B, L, D) in x's dtype, and the memory (B, q, D), float32 or wider, or None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, or an unknown form.
    """
    check_tensor("x", x, (None, None, None), "B, L, D")
    is_deferred = isinstance(initial_state, DeferredMemory)
    inputs = ImplicitInputs(x, weight, bias, collapse, collapse_bias, float(theta), scale)
    if isinstance(initial_state, DeferredMemory) and is_one_token(rows, x.shape[1], initial_state):
        decode = decoder(x, activation, backend)
        if decode is not None:  # it checks what it is given
            y, after = decode(inputs, initial_state, overwrites=rows.overwrites_states)
            return y, after if rows.return_final_state else None
    memory = apply_deferred(initial_state, theta) if isinstance(initial_state, DeferredMemory) else initial_state
    check_tensor("weight", weight, (3, None, None), "3, q', q", beside=x)
    reduced, order = weight.shape[1:]
    check_tensor("bias", bias, (3, reduced), "3, q'", beside=x, optional=True)
    check_tensor("collapse", collapse, (reduced,), "q'", beside=x)
    check_tensor("collapse_bias", collapse_bias, (1,), "1", beside=x, optional=True)
    check_memory(order, theta, memory, x)
    seq_idx, lengths = checked_rows(rows, x.shape[0], x.shape[1])
    if form not in FORMS:
        raise ValueError(f"form={form!r} must be one of {', '.join(map(repr, FORMS))}.")
    inputs = ImplicitInputs(*inputs[:7], memory, lengths, rows.return_final_state, form, activation)
    y, final = run_by_document(_OP.select(x.device.type, x.dtype, backend), inputs, seq_idx)
    return y, defer_updates(final) if is_deferred and final is not None else final


__all__ = ["DeferredMemory", "implicit_attention", "memory_state", "named_memory"]
