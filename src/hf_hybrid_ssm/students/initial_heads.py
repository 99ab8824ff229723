"""A Longhorn mixer with heads beside a window of attention: it starts with the heads of that attention, and unheard.

Keys and queries are the attention's, with their biases, norms and rotation; heads that share keys and values in the
attention have copies of them. Values pass in pairs of channels, since silu(v) - silu(-v) = v. The output projection is
zero: until it is trained, the block computes what the window alone would.

What the scan then holds is linear attention whose memory fades. With small steps Δ ≈ β, number n of a state keeps
1 - β k_n² of itself; for a memory of T tokens, on average over the N numbers,

    β = N / (T E|k|²).

E|k|² follows from the weights: the layer's input is normed, so its channels deviate by the norm's weights. Queries
are scaled by E|k|² / N^1.5 = 1 / (β T √N): what is read is the mean of s v over the memory, with the attention's own
scores s = q · k / √N. That is softmax attention to a long past, to first order in s and without the mean of v.
"""

from typing import Any

import torch

from hf_hybrid_ssm.students.initial_projections import inverse_silu, scaling_of
from hf_hybrid_ssm.students.memory import HeadMixer
from hf_hybrid_ssm.students.norm_gains import gain_of

MEMORIES = (1.0, 16.0)
"""Shortest and longest memory of the heads, in windows; a single one has their geometric mean."""
LARGEST_BETA = 0.5


@torch.no_grad()
def init_from_heads(mixer: HeadMixer, attention: Any, input_gain: torch.Tensor, window: int) -> None:
    """Set the weights of `mixer` from those of the attention beside it (the module's text says how); its output
    projection stays as it is.

    A head's channels beyond the pairs of its values keep their initial values.

    Args:
        attention: of queries, keys, values and output, each projected by itself.
        input_gain: (d,), of the norm of its input (see `norm_gains`).
        window: the tokens that the attention sees.

    Raises:
        ValueError: the mixer has heads of another size than the attention, too few channels for their values, or no
            biases.
    """
    size = attention.head_dim
    heads, groups = attention.q_proj.out_features // size, attention.k_proj.out_features // size
    _check(mixer, heads, size)
    energies = _key_energies(attention, input_gain, groups).repeat_interleave(heads // groups)
    _carry_keys_and_queries(mixer, attention, heads // groups, energies / size * scaling_of(attention))
    shares = torch.linspace(0, 1, heads) if heads > 1 else torch.tensor([0.5])
    memories = window * MEMORIES[0] * (MEMORIES[1] / MEMORIES[0]) ** shares.to(energies)
    beta = (size / (memories * energies)).clamp(max=LARGEST_BETA)
    channels = len(mixer.D) // heads
    mixer.dt_proj.weight.zero_()
    mixer.dt_bias.copy_(torch.logit(beta).repeat_interleave(channels))
    mixer.D.zero_()
    _carry_values(mixer, attention, heads // groups, channels)


def _check(mixer: HeadMixer, heads: int, size: int) -> None:
    if mixer.state_size != size:
        raise ValueError(f"state_size={mixer.state_size} of the mixer, but the attention's heads need {size}.")
    if mixer.in_proj.bias is None:
        raise ValueError("use_bias=False: a mixer that starts from attention needs the biases of its projections.")
    if 2 * heads * size > len(mixer.D):
        raise ValueError(
            f"the values of {heads} heads have {heads * size} channels, which need {2 * heads * size} of the mixer "
            f"(expand * hidden_size), not {len(mixer.D)}."
        )


def _key_energies(attention: Any, input_gain: torch.Tensor, groups: int) -> torch.Tensor:
    """E|k|² of each group (G,), in float64."""
    if getattr(attention, "k_norm", None) is not None:
        return gain_of(attention.k_norm, attention.head_dim).square().sum().expand(groups)
    energy = (attention.k_proj.weight.double() * input_gain).square().sum(1)
    if attention.k_proj.bias is not None:
        energy = energy + attention.k_proj.bias.double().square()
    return energy.unflatten(0, (groups, -1)).sum(1)


def _carry_keys_and_queries(mixer: Any, attention: Any, shared: int, scale: torch.Tensor) -> None:
    """`shared`: heads of a group; `scale` (H,) of the queries."""
    size = attention.head_dim
    for name in ("weight", "bias"):
        ours, theirs = ((getattr(each.k_proj, name), getattr(each.q_proj, name)) for each in (mixer, attention))
        if theirs[0] is None:
            ours[0].zero_()
            ours[1].zero_()
            continue
        ours[0].copy_(theirs[0].unflatten(0, (-1, size)).repeat_interleave(shared, 0).flatten(0, 1))
        queries = theirs[1].double().unflatten(0, (-1, size))
        if mixer.q_norm is None:
            queries = queries * scale.view(-1, *[1] * (queries.dim() - 1))
        ours[1].copy_(queries.flatten(0, 1))
    if mixer.q_norm is not None:  # a copy of the attention's; scaled after it, where all heads have the same scale
        gain = gain_of(attention.q_norm, size)
        mixer.k_norm.load_state_dict(attention.k_norm.state_dict())
        mixer.q_norm.weight.copy_(attention.q_norm.weight.double() + (scale[0] - 1) * gain)


def _carry_values(mixer: Any, attention: Any, shared: int, channels: int) -> None:
    """`shared`: heads of a group; `channels`: of a head of the mixer."""
    size, total = attention.head_dim, len(mixer.D)
    weight, bias = attention.v_proj.weight, attention.v_proj.bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    for ours, theirs in ((mixer.in_proj.weight, weight), (mixer.in_proj.bias, bias)):
        values = theirs.unflatten(0, (-1, size)).repeat_interleave(shared, 0)  # (H, e, ...)
        by_head = ours[:total].unflatten(0, (-1, channels))
        by_head[:, :size] = values
        by_head[:, size : 2 * size] = -values
    mixer.in_proj.weight[total:] = 0  # a constant gate of one
    mixer.in_proj.bias[total:] = inverse_silu(1.0)
    mixer.conv1d.weight.zero_()
    mixer.conv1d.weight[..., -1] = 1
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias.zero_()
