"""Text for language models: documents from files or the Hub, a tokenizer, and rows packed with whole documents."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

LOADERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
END_OF_TEXT = "<|endoftext|>"


@dataclass
class DataArguments:
    """Where text comes from and how it is cut."""

    train_files: list[str] = field(
        default_factory=list, metadata={"help": "txt (one document a file), jsonl, parquet"}
    )
    validation_files: list[str] = field(default_factory=list)
    dataset_name: str | None = field(default=None, metadata={"help": "a data set on the Hub instead of files"})
    dataset_config: str | None = None
    train_split: str = "train"
    validation_split: str | None = "validation"
    validation_fraction: float = field(
        default=0.1, metadata={"help": "without validation text: the share of the last training rows held out"}
    )
    text_column: str = "text"
    streaming: bool = False
    sequence_length: int = 1024
    tokenizer: str | None = field(default=None, metadata={"help": "name or folder; without it one is trained"})
    tokenizer_vocab_size: int = 4096
    preprocessing_workers: int | None = None

    def __post_init__(self):
        if bool(self.train_files) == (self.dataset_name is not None):
            raise ValueError(
                f"give either train_files or dataset_name, got train_files={self.train_files} and "
                f"dataset_name={self.dataset_name!r}."
            )
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length={self.sequence_length} must be at least 2.")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must lie between 0 and 1.")


def load_documents(data: DataArguments) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]:
    """Training and validation documents, one a row, in the column `text_column`; validation may be None.

    Raises:
        FileNotFoundError: a file name or pattern matches nothing.
        ValueError: files of an unknown kind, or without the text column.
    """
    if data.dataset_name is not None:
        options = {"streaming": data.streaming}
        train = load_dataset(data.dataset_name, data.dataset_config, split=data.train_split, **options)
        validation = None
        if data.validation_split is not None:
            validation = load_dataset(data.dataset_name, data.dataset_config, split=data.validation_split, **options)
    else:
        train = documents_of_files(data.train_files, streaming=data.streaming)
        validation = documents_of_files(data.validation_files) if data.validation_files else None
    for documents in (train, validation):
        columns = None if documents is None else documents.column_names
        if columns is not None and data.text_column not in columns:
            raise ValueError(f"text_column={data.text_column!r} is not among the columns {columns}.")
    return train, validation


def documents_of_files(patterns: Iterable[str], *, streaming: bool = False) -> Dataset | IterableDataset:
    """The documents of local files of one kind: a text file is one document, other files have one a row."""
    paths = []
    for pattern in patterns:
        found = sorted(glob(pattern, recursive=True))
        if not found:
            raise FileNotFoundError(f"no file matches {pattern!r}.")
        paths.extend(found)
    kinds = {LOADERS.get(Path(path).suffix) for path in paths}
    if len(kinds) != 1 or None in kinds:
        raise ValueError(f"files must all be of one kind of {sorted(LOADERS)}, got {paths}.")
    kind = kinds.pop()
    options: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
    return load_dataset(kind, data_files=paths, split="train", streaming=streaming, **options)


def get_tokenizer(data: DataArguments, documents: Dataset | IterableDataset) -> PreTrainedTokenizerBase:
    """The tokenizer named in the settings, or a byte-level BPE trained on the documents."""
    if data.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(data.tokenizer)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer={data.tokenizer!r} has no end-of-text token, which must end documents.")
        return tokenizer
    texts = (document[data.text_column] for document in islice(documents, 100_000))
    return train_tokenizer(texts, data.tokenizer_vocab_size)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: every text has tokens, none is unknown."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_in_pieces(texts), trainer)
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **names)


def _in_pieces(texts: Iterable[str], size: int = 100_000) -> Iterator[str]:
    """A whole book at once would be a single unit of work for the trainer."""
    for text in texts:
        yield from (text[start : start + size] for start in range(0, len(text), size))


def begin_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token every document is read from: the beginning-of-text token, or the end-of-text token where none is.

    lm-eval takes the same one as context of a text's first token, and `generate()` without a prompt starts from it.
    """
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The texts' tokens alone, without special ones."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def packed_rows(
    documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, data: DataArguments
) -> Dataset | IterableDataset:
    """The documents' rows, as `pack` makes them."""
    columns = documents.column_names or list(next(iter(documents)))
    workers = {} if isinstance(documents, IterableDataset) else {"num_proc": data.preprocessing_workers}
    size = 100  # documents that fill rows together; the end of each such group is padded

    def tokenize_and_pack(batch: dict[str, list]) -> dict[str, list]:
        ids = token_ids(batch[data.text_column], tokenizer)
        return pack(ids, data.sequence_length, begin_of(tokenizer), tokenizer.eos_token_id)

    return documents.map(tokenize_and_pack, batched=True, batch_size=size, remove_columns=columns, **workers)


def pack(documents: list[list[int]], length: int, begin: int, end: int) -> dict[str, list]:
    """Token lists → rows of exactly `length` tokens, filled with one document after the other.

    A document is read as `begin` and its tokens, and what is to be predicted are its tokens and `end`:

        input_ids     begin a b c begin d e ...
        labels        -100  a b c end   d e ...  (models shift them: the output at `c` is compared with `end`)
        position_ids  0     1 2 3 0     1 2 ...

    So the first token of a document is a target like any other, given `begin` alone: `position_ids` start again, and
    models keep documents apart. The first token of a row is never a target. `continues` says that the row goes on with
    the document of the row before; positions count from 0 there as well. The last row is filled up with tokens that
    count for nothing.
    """
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for document in filter(None, documents):
        tokens += [begin, *document]
        labels += [end, *document]
        positions += range(len(document) + 1)
    if missing := -len(tokens) % length:
        tokens += [begin] * missing
        labels += [end, *[-100] * (missing - 1)]
        positions += range(missing)
    rows: dict[str, list] = {"input_ids": [], "labels": [], "position_ids": [], "continues": []}
    for start in range(0, len(tokens), length):
        stop = start + length
        rows["input_ids"].append(tokens[start:stop])
        rows["labels"].append([-100, *labels[start + 1 : stop]])
        rows["position_ids"].append(_from_row_start(positions[start:stop]))
        rows["continues"].append(positions[start] > 0)
    return rows


def _from_row_start(positions: list[int]) -> list[int]:
    """A document that goes on from the row before counts from 0 again: models never see the token before."""
    first = positions[0]
    if first == 0:
        return positions
    until = next((i for i, position in enumerate(positions) if position == 0), len(positions))
    return [position - first for position in positions[:until]] + positions[until:]
