"""A Longhorn mixer that starts as a first-order expansion of the attention it replaces.

Softmax attention averages values with weights exp(s), s = q · k. To first order in s, with an exponential window in
place of the whole past,

    y_t = Σ_i w_{t-i} (1 + s_{t,i}) v_i,    Σ w = 1,

which is what the scan computes when keys and queries are c (1, k) and c (1, q): the state forgets with 1 - Δc² and
each token enters with Δc² (1 + q · k). So

- values: x = silu(W x) bends them, but silu(v) - silu(-v) = v. Channels come in pairs of both signs, and the output
  projection takes the difference.
- keys and queries: one pair serves all channels here. It holds the leading singular directions of the heads' mean
  W_q' W_k (before rotation: positions are lost), written as a linear function of the values, from which the mixer
  computes both, by least squares.
- the constant 1 is a channel whose input is a bias; the gate and the step size are constants as well.
"""

import math
from typing import Any

import torch

from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornMixer

MEMORY = 64
"""Tokens after which a value's weight has fallen to 1/e in a new mixer."""
RIDGE = 1e-3
"""Of the least squares, relative to the mean squared singular value of the values' projection."""


def inverse_silu(value: float) -> float:
    """b with silu(b) = value > 0, by Newton's method."""
    b = value
    for _ in range(50):
        s = 1 / (1 + math.exp(-b))
        b -= (b * s - value) / (s * (1 + b * (1 - s)))
    return b


def scaling_of(attention: Any) -> float:
    """What its q·k is multiplied by."""
    return getattr(attention, "scaling", None) or 1 / math.sqrt(attention.head_dim)


def score_factors(attention: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (rank, hidden size) each, whose products are the best fit to the heads' mean scores.

    Q' K = the leading `rank` singular triples of mean_h W_q^h' W_k^h, times what the attention multiplies q·k by.
    """
    head_dim = attention.head_dim
    queries = attention.q_proj.weight.double().unflatten(0, (-1, head_dim))  # (H, e, M)
    keys = attention.k_proj.weight.double().unflatten(0, (-1, head_dim))
    keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)
    scores = torch.einsum("hem,hen->mn", queries, keys) * (scaling_of(attention) / len(queries))
    left, values, right = torch.linalg.svd(scores)
    scale = values[:rank].sqrt().unsqueeze(1)
    return left.T[:rank] * scale, right[:rank] * scale


@torch.no_grad()
def init_from_attention(mixer: LonghornMixer, attention: Any) -> None:
    """Set the weights of `mixer` from those of the attention that it replaces (the module's text says how).

    Channels beyond the values' pairs keep their initial values, and do not reach the output yet.

    Args:
        attention: of queries, keys, values and output, each projected by itself.

    Raises:
        ValueError: the mixer has no bias, or too few channels for the values.
    """
    channels, rank = len(mixer.D), mixer.dt_proj.in_features
    states = (mixer.x_proj.out_features - rank) // 2
    values = attention.v_proj.weight.double()  # (KV heads x e, M)
    count = len(values)
    if mixer.in_proj.bias is None or mixer.out_proj.bias is None:
        raise ValueError("use_bias=False: a mixer that starts from attention needs the biases of its projections.")
    if 2 * count > channels:
        raise ValueError(
            f"the values have {count} channels, which need {2 * count} of the mixer (expand * hidden_size), "
            f"not {channels}."
        )
    outputs = _outputs_by_value(attention)  # (M, count)
    constant = channels - 1
    pairs = torch.arange(count)
    if 2 * count == channels:  # the pair that matters least makes room for the constant
        strength = values.norm(dim=1) * outputs.norm(dim=0)
        least = int(strength.argmin())
        pairs = torch.cat([pairs[:least], pairs[least + 1 :]])
    values, outputs, count = values[pairs], outputs[:, pairs], len(pairs)
    weight, bias = mixer.in_proj.weight, mixer.in_proj.bias
    bias.zero_()
    weight[:count] = values.to(weight)
    weight[count : 2 * count] = -values.to(weight)
    weight[constant] = 0
    weight[channels:] = 0
    bias[constant] = bias[channels:] = inverse_silu(1.0)
    if attention.v_proj.bias is not None:
        shift = attention.v_proj.bias[pairs].to(bias)
        bias[:count], bias[count : 2 * count] = shift, -shift
    mixer.conv1d.weight.zero_()
    mixer.conv1d.weight[..., -1] = 1
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias.zero_()

    queries, keys = score_factors(attention, states - 1)
    level = _level(states)
    projection = mixer.x_proj.weight
    projection[rank:] = 0
    for start, factors in ((rank, keys), (rank + states, queries)):
        fitted = _in_terms_of(factors, values) * level
        projection[start, constant] = level
        projection[start + 1 : start + states, :count] = fitted.to(projection)
        projection[start + 1 : start + states, count : 2 * count] = -fitted.to(projection)
    mixer.dt_proj.weight.zero_()
    mixer.dt_bias.zero_()
    mixer.D.zero_()

    out = mixer.out_proj.weight
    out.zero_()
    out[:, :count] = outputs.to(out)
    out[:, count : 2 * count] = -outputs.to(out)
    mixer.out_proj.bias.zero_()
    if attention.o_proj.bias is not None:
        mixer.out_proj.bias.copy_(attention.o_proj.bias)


def _level(states: int) -> float:
    """c with Δc² = 1 / MEMORY, where β = sigmoid(0) and Δ = β / (1 + β |k|²), all of |k|² being c²."""
    beta = 0.5
    forget = 1 / MEMORY
    return math.sqrt(forget / (beta * (1 - forget)))


def _outputs_by_value(attention: Any) -> torch.Tensor:
    """(M, KV heads x e): the output projection, summed over the query heads that share values."""
    groups = attention.q_proj.weight.shape[0] // attention.v_proj.weight.shape[0]
    weight = attention.o_proj.weight.double().unflatten(1, (-1, groups, attention.head_dim))
    return weight.sum(2).flatten(1)


def _in_terms_of(factors: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A (N, count) with A W_v as near to `factors` (N, M) as a ridge allows."""
    gram = values @ values.T
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + ridge, values @ factors.T).T
