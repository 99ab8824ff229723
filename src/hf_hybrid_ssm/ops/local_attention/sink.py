"""The sink: one column of the softmax that stands for no key of the row, with a logit for each token and one value.

Its special cases are the constant sink (the key and value of a first token that the window has left), the scalar sink
(a learned logit, the value 0), and the zeros before a document (`zero_key_logits`, the value 0).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.checks import check_tensor


class Sink(NamedTuple):
    """A sink on its way through the torch backend.

    Args:
        logits: (B or 1, H or 1, L), -inf where it is absent.
        values: (H or G, V); None for 0.
        is_everywhere: no token is without it.
    """

    logits: torch.Tensor
    values: torch.Tensor | None
    is_everywhere: bool


def check_sink(
    logits: torch.Tensor | None,
    values: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
    zero_kv_sink: bool,
) -> None:
    """`sink_logits` (B, H, L) beside q (B, H, L, E), `sink_values` (H or G, V) beside v (B, G, L, V).

    Raises:
        TypeError: not tensors of floating-point numbers.
        ValueError: a shape or device that does not fit, values without logits, or two sinks.
    """
    if logits is None:
        if values is not None:
            raise ValueError("sink_values without sink_logits: the sink needs a logit for each token.")
        return
    if zero_kv_sink:
        raise ValueError("zero_kv_sink=True and sink_logits are two sinks: give one of them.")
    check_tensor("sink_logits", logits, tuple(q.shape[:-1]), "B, H, L", beside=q)
    check_tensor("sink_values", values, (None, v.shape[-1]), "H or G, V", beside=q, optional=True)
    heads, groups = q.shape[1], v.shape[1]
    if values is not None and values.shape[0] not in (heads, groups):
        raise ValueError(f"sink_values must have a row for each of {heads} or {groups} heads, got {values.shape[0]}.")
    for name, tensor in (("sink_logits", logits), ("sink_values", values)):
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, got {tensor.dtype}.")


def beside_sink(
    y: torch.Tensor, total: torch.Tensor, logits: torch.Tensor, values: torch.Tensor | None
) -> torch.Tensor:
    """Attention y (B, H, L, V) to keys of summed weight exp(total), total (B, H, L), with a sink beside them.

    The keys keep the share exp(total) / (exp(total) + exp(logit)); the sink has the rest. Without keys total is -inf
    and y is 0.
    """
    logits = logits.to(total.dtype)
    absent = logits.isneginf()
    keys = torch.where(absent, 1.0, torch.sigmoid(total - torch.where(absent, 0.0, logits)))
    of_keys = y * keys.unsqueeze(-1).to(y.dtype)
    if values is None:
        return of_keys
    values = values.to(y.dtype).repeat_interleave(y.shape[1] // values.shape[0], 0).unsqueeze(1)
    return of_keys + (1 - keys).unsqueeze(-1).to(y.dtype) * values


def append_sink(
    k: torch.Tensor, v: torch.Tensor, values: torch.Tensor | None, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """k (R, G, K, E) and v (R, G, K, V) with a column for the sink, whose key is 0: its logit is that of the mask.

    Args:
        values: (H or G, V), or None for 0. With one for each of the `heads` H, keys and values are repeated for them.
    """
    if values is None:
        return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if values.shape[0] != k.shape[1]:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    column = values.to(v.dtype)[None, :, None].expand(v.shape[0], -1, -1, -1)
    return F.pad(k, (0, 0, 0, 1)), torch.cat([v, column], 2)
