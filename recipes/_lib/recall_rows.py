"""Rows of text that cannot be predicted without what stood beyond a window: copies of passages, and values of keys.

Made of rows of the training text, some of whose tokens are replaced: half of them repeat passages of the row itself,
half say facts ("The code of river is 48213.") and say them again, in another order, more than a window later.
"""

import random
from typing import Any

from _lib.rows import Row, RowStream

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from hf_hybrid_ssm.upcycle.probe_prompts import words_of

PASSAGES = (8, 32)
"""Tokens of a copied passage."""
SPACING = 128
"""A passage, or a fact, for each so many tokens of a row's first part."""
LEAST_WORDS = 64
"""A tokenizer with fewer words of its own names facts by token ids."""


def with_recall_rows(
    rows: Dataset | RowStream, tokenizer: PreTrainedTokenizerBase, share: float, window: int, seed: int
) -> Dataset | RowStream:
    """The rows, and so many more that these are `share` of all.

    Args:
        rows: as `packed_rows` makes them.
        share: at least 0, below 1.
        window: tokens between something and its repetition, at least.

    Raises:
        ValueError: the rows are streamed, or too short for the window.
    """
    if share == 0:
        return rows
    if isinstance(rows, RowStream):
        raise ValueError(f"recall_share={share} needs rows that are not streamed: streaming=false.")
    length = len(rows[0]["input_ids"])
    if length < window + 4 * PASSAGES[1]:
        raise ValueError(
            f"sequence_length={length} is too short for recall_share={share}: it must be at least "
            f"{window + 4 * PASSAGES[1]}, the window and {4 * PASSAGES[1]} tokens."
        )
    draw = random.Random(seed)
    words = [word for word in words_of(tokenizer) if len(word) > 3]
    names = words if len(words) >= LEAST_WORDS else None
    count = max(1, round(share / (1 - share) * len(rows)))
    made = [
        _row(rows[draw.randrange(len(rows))], index % 2 == 0, tokenizer, names, window, draw) for index in range(count)
    ]
    return concatenate_datasets([rows, Dataset.from_list(made, features=rows.features)])


def _row(row: Row, is_copy: bool, tokenizer: Any, names: list[str] | None, window: int, draw: random.Random) -> Row:
    """One document: pieces in slots of its first part, and again, in another order, in slots of its last part."""
    ids = np.array(row["input_ids"])
    early = (len(ids) - window) // 2
    slots = max(1, early // SPACING)
    size = (early - 1) // slots
    pieces = []
    for slot in range(slots):
        piece = None if is_copy else np.array(_fact(tokenizer, names, draw))
        count = draw.randint(*PASSAGES) if piece is None else len(piece)
        start = 1 + slot * size + draw.randint(0, size - count)
        if piece is not None:
            ids[start : start + count] = piece
        pieces.append(ids[start : start + count].copy())
    draw.shuffle(pieces)
    for slot, piece in enumerate(pieces):
        start = early + window + slot * size + draw.randint(0, size - len(piece))
        ids[start : start + len(piece)] = piece
    labels = ids.copy()
    labels[0] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": np.arange(len(ids)), "continues": False}


def _fact(tokenizer: Any, names: list[str] | None, draw: random.Random) -> list[int]:
    """The tokens of a statement: a name and a value of five digits, or of three token ids."""
    if names is None:
        special = set(tokenizer.all_special_ids)
        return draw.sample([token for token in range(len(tokenizer)) if token not in special], 4)
    value = "".join(draw.choices("0123456789", k=5))
    return tokenizer(f" The code of {draw.choice(names)} is {value}.", add_special_tokens=False)["input_ids"]
