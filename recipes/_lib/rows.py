"""Documents become rows: packed one after the other, from a table or from a stream that is shuffled on the way."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from itertools import chain, count, islice
from typing import Any

from _lib.documents import DataArguments, begin_of, token_ids

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
Cut = Callable[[Iterable[list[int]]], Iterator[Row]]  # the documents' tokens → rows


class RowStream(torch.utils.data.IterableDataset):
    """Rows of streamed documents, numbered in the column `row`.

    With a seed, for training: without end, pass after pass over the documents. The order of their files, and of the
    rows in a buffer, is drawn anew in each pass from the seed and the pass alone. So a resumed run, for which the
    Trainer reads the stream again up to where it stopped, continues with the same rows. Without a seed: one pass, in
    order.

    Workers of a data loader share the files of the documents out.

    Raises:
        ValueError: while reading, the documents hold no row.
    """

    def __init__(self, documents: IterableDataset, cut: Cut, seed: int | None = None, shuffle_buffer: int = 1):
        self.documents, self.cut, self.seed, self.shuffle_buffer = documents, cut, seed, shuffle_buffer
        self.limit: int | None = None
        self.function: Callable[[Row], Row] = dict

    def take(self, rows: int) -> "RowStream":
        """Only the first `rows`."""
        other = copy(self)
        other.limit = rows
        return other

    def map(self, function: Callable[[Row], Row]) -> "RowStream":
        """What `function` makes of each row."""
        other = copy(self)
        other.function = function
        return other

    def __iter__(self) -> Iterator[Row]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rows: Iterator[Row] = chain.from_iterable(self._passes(number))
        if self.limit is not None:
            rows = islice(rows, len(range(number, self.limit, workers)))
        empty = True
        for index, row in enumerate(rows):
            empty = False
            yield self.function(row | {"row": number + index * workers})
        if empty and worker is None:
            raise ValueError("the streamed documents hold no text.")

    def _passes(self, worker: int) -> Iterator[Iterator[Row]]:
        """The rows of each pass; a pass without any is the last."""
        for number in count() if self.seed is not None else range(1):
            documents = self.documents
            if self.seed is not None and self.shuffle_buffer > 1:
                files = np.random.default_rng([self.seed, number])
                documents = documents.shuffle(generator=files, buffer_size=1)
            rows = self.cut(document["input_ids"] for document in documents)
            if (first := next(rows, None)) is None:
                return
            order = np.random.default_rng([self.seed or 0, number, worker])
            yield shuffled(chain([first], rows), self.shuffle_buffer, order)


def shuffled(rows: Iterable[Row], size: int, random: np.random.Generator) -> Iterator[Row]:
    """Each row is drawn from a buffer of `size`, which the next one fills up again; 1 keeps the order."""
    buffer: list[Row] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        place = int(random.integers(size))
        yield buffer[place]
        buffer[place] = row
    yield from (buffer[place] for place in random.permutation(len(buffer)))


def cut_rows(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    cut: Cut,
    seed: int | None = None,
) -> Dataset | RowStream:
    """The rows that `cut` makes of the documents' tokens; `seed` is for a `RowStream` to train on."""
    columns = documents.column_names or list(next(iter(documents)))

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        return {"input_ids": token_ids(batch[data.text_column], tokenizer)}

    options = {"batched": True, "batch_size": 100, "remove_columns": columns}
    if isinstance(documents, IterableDataset):
        return RowStream(documents.map(tokenize, **options), cut, seed, data.shuffle_buffer if seed is not None else 1)
    tokens = documents.map(tokenize, num_proc=data.preprocessing_workers, **options)
    workers = min(data.preprocessing_workers or 1, max(1, len(tokens)))
    parts = [tokens.shard(workers, number, contiguous=True) for number in range(workers)]
    # the code is part of what the cached rows are known by
    given = {"parts": parts, "cut": cut, "code": inspect.getsource(inspect.unwrap(getattr(cut, "func", cut)))}
    return Dataset.from_generator(_rows_of_parts, gen_kwargs=given, num_proc=workers if workers > 1 else None)


def _rows_of_parts(parts: list[Dataset], cut: Cut, code: str) -> Iterator[Row]:
    yield from cut(document["input_ids"] for part in parts for document in part)


def packed_rows(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    seed: int | None = None,
) -> Dataset | RowStream:
    """The documents in rows of `sequence_length` tokens, as `pack` makes them."""
    cut = partial(pack, length=data.sequence_length, begin=begin_of(tokenizer), end=tokenizer.eos_token_id)
    return cut_rows(documents, tokenizer, data, cut, seed)


def pack(documents: Iterable[list[int]], length: int, begin: int, end: int) -> Iterator[Row]:
    """Token lists → rows of exactly `length` tokens, filled with one document after the other.

    A document is read as `begin` and its tokens, and what is to be predicted are its tokens and `end`:

        input_ids     begin a b c begin d e ...
        labels        -100  a b c end   d e ...  (models shift them: the output at `c` is compared with `end`)
        position_ids  0     1 2 3 0     1 2 ...

    So the first token of a document is a target like any other, given `begin` alone: `position_ids` start again, and
    models keep documents apart. The first token of a row is never a target. `continues` says that the row continues
    the document of the previous row; positions count from 0 there as well. The last row of all is filled up with
    tokens that are ignored.
    """
    held = np.empty((3, 0), dtype=np.int64)  # tokens, labels and positions of a row that is not yet full
    for document in filter(None, documents):
        new = [[begin, *document], [end, *document], range(len(document) + 1)]
        held = np.concatenate([held, np.array(new, dtype=np.int64)], axis=1)
        full = held.shape[1] // length * length
        yield from _rows_of_block(held[:, :full], length)
        held = held[:, full:]
    if held.shape[1]:
        missing = length - held.shape[1]
        fill = [[begin] * missing, [end, *[-100] * (missing - 1)], range(missing)]
        yield from _rows_of_block(np.concatenate([held, np.array(fill)], axis=1), length)


def _rows_of_block(block: np.ndarray, length: int) -> Iterator[Row]:
    """Rows of the columns of `block`, (3, n x length)."""
    for start in range(0, block.shape[1], length):
        tokens, labels, positions = block[:, start : start + length].copy()
        continues = positions[0] > 0
        if continues:  # a document that goes on counts from 0 again: models never see the token before
            borders = np.flatnonzero(positions == 0)
            positions[: borders[0] if len(borders) else length] -= positions[0]
        labels[0] = -100
        yield {"input_ids": tokens, "labels": labels, "position_ids": positions, "continues": bool(continues)}


def split_rows(
    train: Dataset | RowStream, validation: Dataset | RowStream | None, data: DataArguments
) -> tuple[Dataset | RowStream, Dataset | RowStream]:
    """Hold out the last rows where there is no validation text; at most `max_validation_rows` are evaluated on.

    Raises:
        ValueError: streamed text without validation text, or too few rows.
    """
    if validation is None:
        if isinstance(train, RowStream):
            raise ValueError("streaming=True needs validation_files or a validation_split.")
        held_out = max(1, round(len(train) * data.validation_fraction))
        if held_out >= len(train):
            raise ValueError(
                f"{len(train)} rows are too few to hold some out: lower sequence_length or give more text."
            )
        validation = train.select(range(len(train) - held_out, len(train)))
        train = train.select(range(len(train) - held_out))
    limit = data.max_validation_rows
    if limit is not None and (isinstance(validation, RowStream) or limit < len(validation)):
        validation = validation.take(limit)
    return train, validation
