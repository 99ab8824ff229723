"""Modules of options of SPADE that are off by default.

Adaptive input and softmax for large vocabularies sorted by frequency (`adaptive_cutoffs`; Baevski and Auli, 2018):
`torch.nn.AdaptiveLogSoftmaxWithLoss` cannot share its weights with an input of bands, which here saves half of them.
Then what only the paper's models of the Long Range Arena have: MEGA's norms (`norm_type`), and pixels as tokens
(`pixel_input`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init


class AdaptiveEmbedding(nn.Module):
    """Frequent tokens have wide embeddings, rare ones narrow ones; each band is projected to the model's width.

    Args:
        bands: ids that end each band, the last is the vocabulary's size.
        hidden_size: d; band b has embeddings of width d / factor^b.
        factor: see above.
    """

    def __init__(self, bands: list[int], hidden_size: int, factor: int = 4):
        super().__init__()
        self.bands = list(bands)
        self.hidden_size = hidden_size
        starts, widths = [0, *bands[:-1]], [hidden_size // factor**band for band in range(len(bands))]
        for band, (start, end, width) in enumerate(zip(starts, bands, widths)):
            self.register_parameter(f"table_{band}", nn.Parameter(torch.zeros(end - start, width)))
            self.register_parameter(f"projection_{band}", nn.Parameter(torch.zeros(hidden_size, width)))

    def set_initial_values(self) -> None:
        for table in self.tables:
            init.normal_(table, std=table.shape[1] ** -0.5)
        for projection in self.projections:
            init.xavier_uniform_(projection)

    @property
    def tables(self) -> list[nn.Parameter]:
        """E_b, (tokens of band b, d / factor^b)."""
        return [self.get_parameter(f"table_{band}") for band in range(len(self.bands))]

    @property
    def projections(self) -> list[nn.Parameter]:
        """P_b, (d, d / factor^b)."""
        return [self.get_parameter(f"projection_{band}") for band in range(len(self.bands))]

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "an adaptive embedding has a table for each band of the vocabulary, and no weight of all tokens: what "
                "changes single tokens (PEFT's trainable_token_indices) cannot be applied; train it whole with "
                "modules_to_save=['embed_tokens']."
            )
        return super().__getattr__(name)

    @torch.no_grad()
    def resize(self, num_tokens: int, std: float | None = None) -> None:
        """Add tokens to the last band, or take them from its end.

        Args:
            num_tokens: of the vocabulary.
            std: of the new tokens' normal embeddings; None: the mean of the band's.

        Raises:
            ValueError: the last band would be empty.
        """
        band, old = len(self.bands) - 1, self.tables[-1]
        start = self.bands[-2] if band else 0
        if num_tokens <= start:
            raise ValueError(
                f"new_num_tokens={num_tokens} leaves nothing of the last band of tokens, which begins at {start} "
                "(adaptive_cutoffs)."
            )
        table = old.new_empty(num_tokens - start, old.shape[1])
        table.copy_(old.mean(0)) if std is None else table.normal_(std=std)
        count = min(len(old), len(table))
        table[:count] = old[:count]
        self.register_parameter(f"table_{band}", nn.Parameter(table, requires_grad=old.requires_grad))
        self.bands[-1] = num_tokens

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, L) ids → (B, L, d)."""
        out = self.projections[0].new_zeros(*input_ids.shape, self.hidden_size)
        start = 0
        for end, table, projection in zip(self.bands, self.tables, self.projections):
            inside = (input_ids >= start) & (input_ids < end)
            looked_up = F.embedding(torch.where(inside, input_ids - start, 0), table)
            out = torch.where(inside.unsqueeze(-1), looked_up @ projection.T, out)
            start = end
        return out


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of the whole vocabulary: log p(token) = log p(its band) + log p(token in the band).

    The first band's tokens and one entry for each other band share a softmax. All weights but those of these entries
    are the embedding's: a band's scores are E_b P_b^T h, those of the first band E_0 h.

    Args:
        base: whose current `embed_tokens`, an `AdaptiveEmbedding`, it reads: PEFT may replace it by a trainable copy.
        dropout: of what is mapped to scores.
    """

    def __init__(self, base: Any, dropout: float = 0.0):
        super().__init__()
        self.base = [base]  # a list: its parameters are saved where they belong
        self.clusters = nn.Parameter(torch.zeros(len(self.embedding.bands) - 1, self.embedding.hidden_size))
        self.dropout = nn.Dropout(dropout)

    def set_initial_values(self) -> None:
        init.normal_(self.clusters, std=self.base[0].config.initializer_range)

    @property
    def embedding(self) -> AdaptiveEmbedding:
        return self.base[0].embed_tokens

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., d) → (..., V) log-probabilities."""
        embedding = self.embedding
        h = self.dropout(hidden_states)
        head = self.first_band(h)
        first = embedding.bands[0]
        parts = [head[..., :first]]
        for band in range(1, len(embedding.bands)):
            parts.append(self._tail(h, band) + head[..., first + band - 1].unsqueeze(-1))
        return torch.cat(parts, -1)

    def loss(self, hidden_states: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
        """(T, d) and (T,) ids → (), the summed cross-entropy; a rare band is computed for its own tokens only."""
        embedding = self.embedding
        first = embedding.bands[0]
        counts = targets != ignore_index
        h, targets = self.dropout(hidden_states[counts]), targets[counts]
        entry = targets  # in the first softmax: the token itself, or its band
        total = h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
        for band in range(1, len(embedding.bands)):
            start, end = embedding.bands[band - 1 : band + 1]
            inside = (targets >= start) & (targets < end)
            entry = torch.where(inside, first + band - 1, entry)
            scores = self._tail(h[inside], band).to(total.dtype)
            total = total + F.nll_loss(scores, targets[inside] - start, reduction="sum")
        return total + F.nll_loss(self.first_band(h).to(total.dtype), entry, reduction="sum")

    def first_band(self, h: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the first band's tokens, then of the other bands."""
        return F.linear(h, torch.cat([self.embedding.tables[0], self.clusters])).log_softmax(-1)

    def _tail(self, h: torch.Tensor, band: int) -> torch.Tensor:
        """Log-probabilities of a band's tokens, given the band."""
        inner = self.dropout(h @ self.embedding.projections[band])
        return F.linear(inner, self.embedding.tables[band]).log_softmax(-1)


class ResizableBandsMixin(PreTrainedModel):
    """A model whose embeddings may be an `AdaptiveEmbedding`."""

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """As in transformers; an adaptive vocabulary grows and shrinks at the end of its last band.

        Raises:
            ValueError: nothing would be left of that band.
        """
        embeddings = self.get_input_embeddings()
        if not isinstance(embeddings, AdaptiveEmbedding):
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if new_num_tokens is None and pad_to_multiple_of is None:
            return embeddings
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        unit = pad_to_multiple_of or 1
        size = -(-size // unit) * unit
        std = None if mean_resizing else embeddings.tables[-1].shape[1] ** -0.5  # as they are initialised
        embeddings.resize(size, std)
        self.config.vocab_size = size
        return embeddings


class ScaleNorm(nn.Module):
    """One learned scalar times x / rms(x)."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.eps = eps

    def set_initial_values(self) -> None:
        init.ones_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.scale


class TimeBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (B, L, D) over batch and time: over the tokens that are not padding.

    Each batch updates the running statistics once, also where gradient checkpointing recomputes the forward.
    """

    def forward(self, x: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, L, D) → the same; `token_mask` (B, L) bool, the tokens that count; None: all."""
        repeats = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # within a backward
        if not self.training or (token_mask is None and not repeats):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)
        if token_mask is None:  # the same operation, whose statistics are dropped
            assert self.running_mean is not None and self.running_var is not None
            mean, variance = self.running_mean.clone(), self.running_var.clone()
            y = F.batch_norm(x.transpose(1, 2), mean, variance, self.weight, self.bias, training=True, eps=self.eps)
            return y.transpose(1, 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        counts = token_mask.unsqueeze(-1).to(wide.dtype)
        count = counts.sum().clamp(min=1)
        mean = (wide * counts).sum((0, 1)) / count
        variance = ((wide - mean).square() * counts).sum((0, 1)) / count
        if not repeats:
            self._update_statistics(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        normalised = (wide - mean) * torch.rsqrt(variance + self.eps)
        return (normalised * self.weight + self.bias).to(x.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running statistics towards those of a batch, as torch does."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(new.to(running.dtype), self.momentum)


class PixelEmbedding(nn.Linear):
    """Grey values 0 … 255 as tokens, normalised and mapped linearly to the width."""

    def __init__(self, hidden_size: int, mean: float, std: float):
        super().__init__(1, hidden_size)
        self.mean, self.std = mean, std

    def set_initial_values(self) -> None:
        """As MEGA's."""
        init.normal_(self.weight, std=1.0)
        init.normal_(self.bias, std=0.1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(((input_ids / 255 - self.mean) / self.std).unsqueeze(-1).to(self.weight.dtype))
