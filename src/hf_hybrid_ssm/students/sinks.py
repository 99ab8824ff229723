"""Sinks of windows: what takes the place of the first token where a window has left it.

In pretrained transformers the first token of a text acts as an attention sink (Xiao et al., arXiv 2309.17453). A
window that has moved on does not see it. In its stead comes

    "constant"      a key and a value of the layer's own, W + 1 tokens before each token;
    "first_token"   the key and the value of the text's first token, which the cache keeps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.core.transforms import without_autocast

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (B or 1, L, ...) of rotary positions, as the teacher's rotary embedding gives them."""
FIRST = ("first_key", "first_value")
"""The names of what a "first_token" sink keeps, (B, G, 1, e) each."""


class ConstantSink(nn.Module):
    """The key and the value of a first token: `key` (G, e), not yet turned by its position, and `value` (G, v).

    Args:
        turned: as of `AttentionLayer`.
        rotate: `apply_rotary_pos_emb` of the teacher.
    """

    def __init__(self, groups: int, key_size: int, value_size: int, turned: int, rotate: Callable | None = None):
        super().__init__()
        self.turned, self.rotate = turned, rotate
        self.key = nn.Parameter(torch.zeros(groups, key_size))
        self.value = nn.Parameter(torch.zeros(groups, value_size))

    def forward(
        self, query: torch.Tensor, angles: Angles | None, turned: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q·k for queries (B, H, L, e) that are turned, (B, L, H) in float32 or wider; and the values.

        Args:
            angles: of the places where the sink is for each query; None where keys are not turned.
            turned: the keys there, if they are known.
        """
        if turned is None:
            key = self.key[None, :, None]
            turned = key if angles is None else self.turn(key, angles)
        return products(query, turned), self.value

    def turn(self, key: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Keys (1 or B, G, 1 or L, e) turned by rotary positions, as the teacher does: (B, G, L, e)."""
        assert self.rotate is not None  # where there are angles
        key = key.expand(max(key.shape[0], angles[0].shape[0]), -1, angles[0].shape[1], -1)
        return rotated(self.rotate, key, angles, self.turned)

    def optimizer_options(self, name: str) -> dict[str, Any]:
        """A sink is not decayed (see `hf_hybrid_ssm.training.optim`)."""
        return {"weight_decay": 0.0}


def rotated(rotate: Callable, heads: torch.Tensor, angles: Angles, turned: int) -> torch.Tensor:
    """Keys or queries (B, heads, L, e) turned by the teacher's `apply_rotary_pos_emb`; `turned` as of
    `AttentionLayer`."""
    part, rest = heads[..., :turned], heads[..., turned:]
    part = rotate(part, part, *angles)[1]
    return part if rest.shape[-1] == 0 else torch.cat([part, rest], -1)


def turned_together(layers: list[Any], angles: Angles) -> dict[int, torch.Tensor]:
    """Layer → the keys (B, G, L, e) of its constant sink, turned at once for all; nothing where some are in shards or
    on another device, and have to wait for their layer's forward."""
    keys = [getattr(module.sink, "key", None) for module in layers]  # None: a sink that an adapter wraps
    held = [key for key in keys if type(key) is nn.Parameter and key.device == angles[0].device]
    if len(held) < len(keys):
        return {}
    turned = layers[0].sink.turn(torch.cat([*held])[None, :, None], angles)
    return dict(zip((module.layer_idx for module in layers), turned.split([len(key) for key in held], 1)))


def angles_before(angles: Angles, distance: Angles) -> Angles:
    """Angles of the places that many tokens before those of `angles`.

    By a difference of angles and not of positions: what is rounded in the angles of a query and of its sink is then
    the same, however far they are. Both may be scaled alike, as in YaRN, and the result is.
    """
    (cos, sin), (cos_w, sin_w) = angles, distance
    scale = (cos_w * cos_w + sin_w * sin_w).rsqrt()
    cos_w, sin_w = cos_w * scale, sin_w * scale
    return cos * cos_w + sin * sin_w, sin * cos_w - cos * sin_w


def products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """q·k of queries (B, H, L, e) and one key for each (B or 1, G, L or 1, e), (B, L, H) in float32 or wider."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device.type):
        by_group = query.to(dtype).unflatten(1, (key.shape[1], -1))
        if query.shape[2] == 1:  # fewer operations for each token
            return torch.matmul(by_group.squeeze(3), key.to(dtype).mT).flatten(1).unsqueeze(1)
        return (by_group * key.to(dtype).unsqueeze(2)).sum(-1).flatten(1, 2).transpose(1, 2)


def first_tokens(
    key: torch.Tensor, value: torch.Tensor, ranks: torch.Tensor, past: States, prefix: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (B, G, L, e) of the first token of each token's document.

    Args:
        key, value: of the rows, (B, G, L, e).
        ranks: (B or 1, L), the tokens before each token in its document.
        past, prefix: the states before, and what their names begin with.
    """
    begin = torch.arange(ranks.shape[1], device=ranks.device) - ranks  # negative: before these rows
    index = begin.clamp(min=0)[:, None, :, None]
    firsts = []
    for name, rows in zip(FIRST, (key, value)):
        own = rows.gather(2, index.expand(*rows.shape[:2], -1, rows.shape[3]))
        held = past.get(prefix + name)
        firsts.append(own if held is None else torch.where((begin < 0)[:, None, :, None], held.to(own.dtype), own))
    return firsts[0], firsts[1]


def last_of(firsts: tuple[torch.Tensor, torch.Tensor], rows: Rows, past: States, prefix: str) -> States:
    """What a "first_token" sink keeps after rows whose documents begin with these keys and values (B, G, L, e)."""
    states = {}
    for name, first in zip(FIRST, firsts):
        if rows.lengths is None:
            states[prefix + name] = first[:, :, -1:].clone()
            continue
        column = (rows.lengths.long() - 1).view(-1, 1, 1, 1)
        last = first.gather(2, column.clamp(min=0).expand(-1, first.shape[1], 1, first.shape[3]))
        states[prefix + name] = torch.where(column < 0, past.get(prefix + name, torch.zeros_like(last)), last)
    return states
