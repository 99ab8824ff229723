"""The ops as tests call them: padding, documents and the wish for a state are keywords here, which tables of problems
hold beside the other arguments."""

import functools
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from hf_hybrid_ssm.ops.core.pages import PagedState
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.linear_scan import StepInputs, lti_token
from hf_hybrid_ssm.ops.local_attention import slot_attention

OF_ROWS = ("seq_idx", "lengths", "return_final_state")


def with_rows(options: dict[str, Any]) -> dict[str, Any]:
    """Options with `Rows` in place of the keywords that it is made of."""
    rows = {name: options[name] for name in OF_ROWS if name in options}
    others = {name: value for name, value in options.items() if name not in rows}
    return others | ({"rows": Rows.of(**rows)} if rows else {})


def mix(mixer: nn.Module, u: Any, **options: Any) -> Any:
    """`mixer(u, ...)`."""
    return mixer(u, **with_rows(options))


def _by_keywords(module: str, name: str) -> Callable[..., Any]:
    op = getattr(import_module(f"hf_hybrid_ssm.ops.{module}"), name)

    @functools.wraps(op)
    def call(*tensors: Any, **options: Any) -> Any:
        return op(*tensors, **with_rows(options))

    return call


causal_conv = _by_keywords("causal_conv", "causal_conv")
diagonal_scan = _by_keywords("linear_scan", "diagonal_scan")
implicit_attention = _by_keywords("implicit_attention", "implicit_attention")
legendre_memory = _by_keywords("legendre_memory", "legendre_memory")
local_attention = _by_keywords("local_attention", "local_attention")
long_conv = _by_keywords("long_conv", "long_conv")
longhorn_scan = _by_keywords("longhorn_scan", "longhorn_scan")
lti_scan = _by_keywords("linear_scan", "lti_scan")


# -- one token of each row, whose state is overwritten ---------------------------------------------------------------

ONE_TOKEN = Rows(return_final_state=True, is_step=True, overwrites_states=True)


def one_token(mixer: nn.Module, u: torch.Tensor, state: Any, *, overwrites: bool = False, **options: Any) -> Any:
    """A mixer on one token (B, D) after a state: y (B, D), and the state after it."""
    is_step = not torch.is_grad_enabled()
    rows = Rows(return_final_state=True, is_step=is_step, overwrites_states=is_step and overwrites)
    y, after = mixer(u.unsqueeze(1), rows=rows, initial_state=state, **options)
    return y[:, 0] if y.shape[1] else y, after


def unread_token(mixer: Any, u: torch.Tensor, state: Any) -> Any:
    """The state of a mixer after one token (B, D), without its output where the mixer can leave it out."""
    return one_token(mixer, u, state, overwrites=True, **({"stride": 2} if mixer.supports_filters else {}))[1]


def _row(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """(B, ...) → (B, 1, ...)."""
    return None if tensor is None else tensor.unsqueeze(1)


def _in_pages(state: torch.Tensor, pages: torch.Tensor | None) -> torch.Tensor | PagedState:
    return state if pages is None else PagedState(state, pages)


def causal_conv_of_token(x, state, weight, bias=None, *, pages=None, **options):
    """`causal_conv` of tokens x (B, D)."""
    held = _in_pages(state, pages)
    return causal_conv(_row(x), weight, bias, rows=ONE_TOKEN, initial_state=held, **options)[0].squeeze(1)


def longhorn_scan_of_token(x, beta_logit, k, q, state, *, z=None, pages=None, **options):
    """`longhorn_scan` of tokens x (B, D)."""
    tokens = [_row(part) for part in (x, beta_logit, k, q)]
    options |= {"rows": ONE_TOKEN, "initial_state": _in_pages(state, pages)}
    return longhorn_scan(*tokens, z=_row(z), **options)[0].squeeze(1)


def systems_token(u, state, decay_minus_one, input_vector, *, low_rank=None, backend=None, **fields):
    """`lti_token` of inputs u (B, D)."""
    low_rank = low_rank or (None, None)
    y = lti_token(StepInputs(_row(u), state, decay_minus_one, input_vector, *low_rank, **fields), backend=backend)
    return None if y is None else y.squeeze(1)


def _of_heads(q, k, v, sink_logits):
    """(B, H, e) → (B, H, 1, e), and logits (B, H) → (B, H, 1)."""
    heads = [None if part is None else part.unsqueeze(2) for part in (q, k, v)]
    return heads, {} if sink_logits is None else {"sink_logits": sink_logits.unsqueeze(2)}


def slots_token(q, k, v, keys, values, seen=None, *, sink_logits=None, **options):
    """`slot_attention` of heads (B, H, e)."""
    heads, sink = _of_heads(q, k, v, sink_logits)
    return slot_attention(*heads, keys, values, seen, **sink, **options).squeeze(2)


def window_token(q, k, v, state, *, static_address=False, sink_logits=None, **options):
    """`local_attention` of heads (B, H, e) after a state, whose keys stay where they are or move along a buffer."""
    heads, sink = _of_heads(q, k, v, sink_logits)
    rows = replace(ONE_TOKEN, capacity=state.keys.shape[2] if static_address else None)
    y, after = local_attention(*heads, rows=rows, initial_state=state, **sink, **options)
    return y.squeeze(2), after
