"""Rows for layers that attend to single columns or count positions: full attention, rotary and learned positions.

They hide padding and other documents by masks, for which the columns of all tokens so far must be known. What is known
of them is cached with the states, beside what `packing.py` caches:

    start       (B,) int64, the column of all tokens so far where the row's last document begins
    token_mask  (B, T) bool, which columns so far are not padding

Then the attention of one token to the keys and values of such columns (`held_attention`).
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.models.inputs import refuse_where
from hf_hybrid_ssm.models.packing import PackedRows
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.local_attention import has_step_kernel, slot_attention

NOT_OF_SLOTS = ("softcap", "position_bias", "s_aux")
"""What transformers may ask of an implementation of attention, and slots do not have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnRows(PackedRows):
    """`PackedRows` that also know the columns before them; made by `with_columns`.

    Args:
        full_token_mask: (B, past + L) bool, the columns so far that are not padding; None where all are real, or where
            the layers do not need it.
        mask_covers_cache: the attention mask was one of all tokens so far.
        needs_starts: the layers need `starts`, in this forward and later.
        starts: (B, L) int64, the column of all tokens so far where each token's document begins; None where that is 0.
    """

    full_token_mask: torch.Tensor | None = None
    mask_covers_cache: bool = False
    needs_starts: bool = False
    starts: torch.Tensor | None = None

    def first(self, num_tokens: int) -> PackedRows:
        """As of `PackedRows`."""
        full = self.full_token_mask
        if full is not None:
            full = full[:, : full.shape[1] - self.length + num_tokens]
        known = {"full_token_mask": full, "mask_covers_cache": self.mask_covers_cache}
        return _with_starts(super().first(num_tokens), self.needs_starts, **known)

    def positions(self, device: torch.device) -> torch.Tensor:
        """(B or 1, L) int64, the real tokens before each token in its document."""
        if self.full_token_mask is None:
            columns = (torch.arange(self.length, device=device) + self.past).unsqueeze(0)
            return columns if self.starts is None else columns - self.starts
        count = self.full_token_mask.cumsum(1)
        positions = count[:, -self.length :] - 1
        if self.starts is not None:
            positions = positions - (count - self.full_token_mask.long()).gather(1, self.starts)
        return positions.clamp(min=0)


FIELDS = tuple(field.name for field in fields(PackedRows))


def with_columns(
    rows: PackedRows,
    attention_mask: torch.Tensor | None,
    *,
    needs_starts: bool,
    keeps_padding: bool,
    mask_name: str = "attention_mask",
) -> ColumnRows:
    """Rows that were read with this mask, (B, L or all tokens so far).

    Args:
        needs_starts: the layers need `starts`, in this forward and later.
        keeps_padding: the layers need `full_token_mask`, in this forward and later.
        mask_name: of the mask, in messages.

    Raises:
        ValueError: the cache holds padding, and it is not known where.
    """
    covers = attention_mask is not None and attention_mask.shape[1] > rows.length
    full_token_mask = None
    if keeps_padding and attention_mask is not None and covers:
        full_token_mask = attention_mask != 0
    elif keeps_padding:  # the mask after what earlier ones said
        _check_columns_are_known(rows, mask_name)
        full_token_mask = _appended(rows)
    return _with_starts(rows, needs_starts, full_token_mask=full_token_mask, mask_covers_cache=covers)


def _with_starts(rows: PackedRows, needs_starts: bool, **known: Any) -> ColumnRows:
    """Of these rows, with `starts`, what else is `known`, and what later pieces must know of both."""
    starts = _starts(rows) if needs_starts else None
    kept = {"start": None if starts is None else starts[:, -1], "token_mask": known["full_token_mask"]}
    given = {name: getattr(rows, name) for name in FIELDS} | {"needs_starts": needs_starts, "starts": starts, **known}
    given["packing_state"] = rows.packing_state | {name: x for name, x in kept.items() if x is not None}
    return ColumnRows(**given)


def _appended(rows: PackedRows) -> torch.Tensor | None:
    """(B, past + L) the columns that are not padding, from those before; None where all are real."""
    before, token_mask = rows.before.get("token_mask"), rows.token_mask
    known = before if token_mask is None else token_mask
    if known is None:
        return None
    real = [known.new_ones(known.shape[0], int(rows.past)) if before is None else before]
    real += [known.new_ones(known.shape[0], rows.length) if token_mask is None else token_mask]
    return torch.cat(real, 1)


def _starts(rows: PackedRows) -> torch.Tensor | None:
    """`ColumnRows.starts`."""
    begins, start = rows.starts_new_document, rows.before.get("start")  # that of the last token before
    seq_idx = None if rows.documents is None else rows.documents.of_columns
    known = [tensor for tensor in (seq_idx, begins, start) if tensor is not None]
    if not known:
        return None
    batch, device = known[0].shape[0], known[0].device
    first = torch.zeros(batch, dtype=torch.int64, device=device) if start is None else start
    first = first if begins is None else torch.where(begins, rows.past, first)
    first = first.unsqueeze(1)
    if seq_idx is None:
        return first.expand(-1, rows.length)
    columns = torch.arange(1, rows.length, device=device) + rows.past
    later = torch.where(seq_idx[:, 1:] != seq_idx[:, :-1], columns, 0)
    return torch.cat([first, later], 1).cummax(1).values


def _check_columns_are_known(rows: PackedRows, name: str) -> None:
    """
    Raises:
        ValueError: there was padding, and layers that attend to single columns were not told where.
    """
    known = None if "token_mask" in rows.before else rows.before.get("padding")
    if known is None or known.is_meta or torch.compiler.is_compiling():
        return
    refuse_where(
        (known != 0).any(),
        f"the cache holds padding, and it is not known where: give an {name} of all tokens so far.",
    )


def check_cache_without_states(cache: Cache | None, rows: ColumnRows) -> None:
    """A model with only full attention cannot cache a packing state: refuse pieces that would need it.

    Raises:
        ValueError: the cache holds documents or padding, and it is not known where.
    """
    if cache is None or any(map(is_recurrent_state_layer, cache.layers)):
        return
    layer = cache.layers[0]
    not_cached = getattr(layer, "not_cached", {})
    if not isinstance(rows.past, int) or rows.past > 0:
        _refuse(not_cached.get("documents"), "several documents of packed rows", "read packed rows at once")
        if not rows.mask_covers_cache:
            _refuse(not_cached.get("padding"), "padding", "give an attention_mask of all tokens so far")
    layer.not_cached = {}
    if rows.starts is not None:
        layer.not_cached["documents"] = (rows.starts[:, -1] > 0).any()
    if rows.full_token_mask is not None:
        layer.not_cached["padding"] = ~rows.full_token_mask.all()


def _refuse(is_held: torch.Tensor | None, what: str, remedy: str) -> None:
    if is_held is not None:
        why = "and a model with only full attention does not keep where"
        refuse_where(is_held, f"cache holds {what}, {why}: {remedy}, or use a new cache.")


def held_attention(
    name: str, rows: Rows, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> torch.Tensor | None:
    """(B, 1, heads, e) of one token of each row, where this is what implementation `name` would compute; else None.

    A static cache has places for tokens that are yet to come. torch's attention reads all of them under a mask; this
    one reads what the mask shows.

    Args:
        query, key, value: (B, H, 1, e), (B, G, T, e) and (B, G, T, v), those of the token among them.
        mask: (B or 1, 1, 1, T) bool, which of the T places the token sees; None: all.
        options: as of transformers' attention functions.
    """
    is_one = rows.is_step and query.is_cpu and query.shape[2] == 1
    if not is_one or name != "sdpa" or any(options.get(option) is not None for option in NOT_OF_SLOTS):
        return None
    if options.get("dropout") or not (mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))):
        return None
    if ALL_ATTENTION_FUNCTIONS[name] is not sdpa_attention_forward:  # it may have been replaced by the user's own
        return None
    dense = all(tensor.stride(-1) == 1 for tensor in (key, value, mask) if tensor is not None)
    # under autocast angles make queries and keys float32, which torch's attention casts
    if not dense or not query.dtype == key.dtype == value.dtype or not has_step_kernel("cpu", key.dtype):
        return None
    shown = None if mask is None else mask[:, 0, 0].expand(query.shape[0], -1)
    return slot_attention(query, None, None, key, value, mask=shown, scale=options.get("scaling")).transpose(1, 2)
