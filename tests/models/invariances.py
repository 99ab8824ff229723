"""The one promise of every causal family: the answer does not depend on how tokens were batched, padded, packed,
split, cached or re-ordered.

Each function checks one way for a given model, raises AssertionError where it fails, and returns the largest deviation
of a logit, of the largest one.
"""

from itertools import pairwise

import torch
from transformers import DynamicCache

from tests.tiny_models import recording_cache

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
OF_LARGEST = 1e-5
"""Of the largest logit, or of 1: float32 rounds by the size of what is summed, and students' logits are up to 8."""


def deviation(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest logit or of 1."""
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(logits, expected, rtol=0, atol=OF_LARGEST * largest)
    return float((logits - expected).abs().max()) / largest


def random_ids(model, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)


@torch.no_grad()
def whole(model, ids: torch.Tensor, **inputs) -> torch.Tensor:
    """Logits of one forward without a cache."""
    return model(ids, use_cache=False, **inputs).logits


@torch.no_grad()
def check_split(model, ids: torch.Tensor, cuts: list[int], cache=None) -> float:
    """Any partition of the tokens into forwards gives the same logits."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    edges = [0, *sorted(set(cuts) & set(range(1, ids.shape[1]))), ids.shape[1]]
    parts = [model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in pairwise(edges)]
    assert cache.get_seq_length() == ids.shape[1]
    return deviation(torch.cat(parts, 1), whole(model, ids))


def pad_rows(rows: list[torch.Tensor], pad_id: int, side: str, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (1, L_b) of different lengths → ids and mask (B, L); side is "left", "right" or "both"."""
    length = max(row.shape[1] for row in rows) + extra
    ids = torch.full((len(rows), length), pad_id)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        room = length - row.shape[1]
        start = {"left": room, "right": 0, "both": room // 2}[side]
        ids[index, start : start + row.shape[1]] = row
        mask[index, start : start + row.shape[1]] = 1
    return ids, mask


@torch.no_grad()
def check_padded(model, rows: list[torch.Tensor], side: str, extra: int = 0) -> float:
    """A row in a padded batch equals the row alone."""
    ids, mask = pad_rows(rows, model.config.pad_token_id or 0, side, extra)
    logits = whole(model, ids, attention_mask=mask)
    assert torch.isfinite(logits).all()
    return max(deviation(logits[i][mask[i].bool()][None], whole(model, row)) for i, row in enumerate(rows))


@torch.no_grad()
def check_padded_continuation(model, first: list[torch.Tensor], second: list[torch.Tensor], side: str) -> float:
    """Two padded turns with a cache equal each row's two turns read at once."""
    pad_id = model.config.pad_token_id or 0
    ids, mask = pad_rows(first, pad_id, side)
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    ids, more = pad_rows(second, pad_id, side)
    logits = model(
        ids,
        attention_mask=torch.cat([mask, more], 1),
        past_key_values=cache,
        use_cache=True,
    ).logits
    return max(
        deviation(logits[i][more[i].bool()][None], whole(model, torch.cat([a, b], 1))[:, a.shape[1] :])
        for i, (a, b) in enumerate(zip(first, second))
    )


@torch.no_grad()
def check_packed(model, documents: list[torch.Tensor], by: str) -> float:
    """Documents packed into one row equal the documents alone; by "seq_idx" or by "position_ids"."""
    ids = torch.cat(documents, 1)
    if by == "seq_idx":
        marks = [torch.full_like(document, index) for index, document in enumerate(documents)]
        positions = [torch.arange(document.shape[1])[None] for document in documents]
        packed = whole(model, ids, seq_idx=torch.cat(marks, 1), position_ids=torch.cat(positions, 1))
    else:
        positions = [torch.arange(document.shape[1])[None] for document in documents]
        packed = whole(model, ids, position_ids=torch.cat(positions, 1))
    alone = torch.cat([whole(model, document) for document in documents], 1)
    return deviation(packed, alone)


@torch.no_grad()
def check_reorder(model, ids: torch.Tensor, order: torch.Tensor, cut: int) -> float:
    """Re-ordering the cache (as beam search does) re-orders the rows."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :cut], past_key_values=cache, use_cache=True)
    cache.reorder_cache(order)
    tail = ids[:, cut:]
    logits = model(tail, past_key_values=cache, use_cache=True).logits
    expected = whole(model, torch.cat([ids[order, :cut], tail], 1))[:, cut:]
    return deviation(logits, expected)


@torch.no_grad()
def check_rollback(model, ids: torch.Tensor, cuts: list[int], removed: int) -> float:
    """Cropping the last tokens off a recording cache leaves the cache as if they had never been read."""
    cache = recording_cache(model)
    edges = [0, *sorted(set(cuts) & set(range(1, ids.shape[1]))), ids.shape[1]]
    for a, b in pairwise(edges):
        model(ids[:, a:b], past_key_values=cache, use_cache=True)
    cache.crop(-removed)
    kept = ids.shape[1] - removed
    assert cache.get_seq_length() == kept
    tail = ids.flip(1)[:, :8]  # more than a window, so that all of the states are read
    logits = model(tail, past_key_values=cache, use_cache=True).logits
    return deviation(logits, whole(model, torch.cat([ids[:, :kept], tail], 1))[:, kept:])


@torch.no_grad()
def check_batch_order(model, ids: torch.Tensor, order: torch.Tensor) -> float:
    """The order and number of the rows in a batch do not matter."""
    logits = whole(model, ids)
    return max(deviation(whole(model, ids[order]), logits[order]), deviation(whole(model, ids[:1]), logits[:1]))
