"""Sinks of window attention: what a token can attend to when the first token has left its window."""

from typing import Any

import torch
from torch import nn

from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.transforms import without_autocast

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (head_dim) of rotary positions."""


class AttentionSink(nn.Module):
    r"""The sink of a layer with window attention: its parameters, and its column of the softmax.

    "constant": a key k̄ and a value v̄ for each key/value head, in the place of the first token's. The logit of token i
    is scale · (R_W q_i) · k̄ with the query rotated by the window's length W, or scale · q_i · k̄ + bias(W). Tokens that
    still see the first token of their document do without: for them nothing changes.

    "scalar": a learned logit for each head, whose value is 0, as gpt-oss' `sinks`; all tokens have it.

    Args:
        kind: "constant" or "scalar".
        heads, groups, head_dim: H query heads, G key/value heads, and their size e. The parameters are `key` and
            `value` (G, e), or `logits` (H,); they start at 0.
    """

    def __init__(self, kind: str, *, heads: int, groups: int, head_dim: int):
        super().__init__()
        self.kind = kind
        if kind == "constant":
            self.key, self.value = (nn.Parameter(torch.zeros(groups, head_dim)) for _ in range(2))
        else:
            self.logits = nn.Parameter(torch.zeros(heads))

    def forward(
        self,
        queries: torch.Tensor,
        rank: torch.Tensor,
        *,
        left: int,
        scale: float,
        is_rotary: bool,
        rotation: Rotation | None = None,
        bias: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor | None]:
        """`sink_logits` (B, H, L), in float32 or wider, and `sink_values` of `ops.local_attention`; both None in
        decoding while no token's window has left its first token.

        Args:
            queries: (B, L, H, e), normalised as the layer does, but not rotated.
            rank: (B or 1, L), the tokens before each token in its document.
            left: of the window (left, ...).
            scale: of q·k.
            is_rotary: the layer has rotary positions; then a constant sink needs `rotation`.
            rotation: turns a query by W (`models.rotary.with_sink_rotation`).
            bias: (H,), of the distance W.

        Raises:
            ValueError: there is no rotation where one is needed.
        """
        dtype = torch.promote_types(queries.dtype, torch.float32)
        if self.kind == "scalar":
            return {"sink_logits": self.logits.to(dtype)[:, None].expand(queries.shape[0], -1, queries.shape[1])}
        if is_rotary and rotation is None:
            raise ValueError("sink_rotation=None, but a constant sink is rotated: give cosines and sines.")
        is_token = queries.shape[1] == 1 and not torch.is_grad_enabled() and can_read_values(rank)
        without = [tokens <= left for (tokens,) in rank.tolist()] if is_token else [True, False]
        if all(without):
            return {"sink_logits": None, "sink_values": None}
        logits = self._logits(queries.to(dtype), self.key.to(dtype), scale, rotation if is_rotary else None)
        logits = logits if bias is None else logits + bias
        if any(without):
            logits = logits.masked_fill((rank <= left).unsqueeze(2), float("-inf"))
        return {"sink_logits": logits.transpose(1, 2), "sink_values": self.value}

    @staticmethod
    def _logits(queries: torch.Tensor, key: torch.Tensor, scale: float, rotation: Rotation | None) -> torch.Tensor:
        """scale · (R_W q) · k̄ of queries (B, L, H, e), (B, L, H)."""
        if rotation is not None:
            half = key.shape[1] // 2  # (R q)·k = q·(R⁻¹ k)
            key = torch.addcmul(key * rotation[0], torch.cat([key[:, half:], -key[:, :half]], 1), rotation[1])
        with without_autocast(queries.device.type):
            by_head = queries.unflatten(2, (key.shape[0], -1))
            if queries.shape[1] == 1:  # a plain product repeats the keys for every token, and is called sooner
                return (by_head @ key.unsqueeze(2)).flatten(2) * scale
            return torch.einsum("blgre,ge->blgr", by_head, key).flatten(2) * scale

    def optimizer_options(self, name: str) -> dict[str, Any]:
        """A sink is not decayed (see `hf_hybrid_ssm.training.optim`)."""
        return {"weight_decay": 0.0}
