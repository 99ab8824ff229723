"""Text for language models: documents from files or the Hub, a tokenizer, and rows packed with whole documents."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from _lib.checks import check_columns, check_either, check_least, check_texts
from _lib.standard_text import standard_documents

from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

LOADERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
END_OF_TEXT = "<|endoftext|>"
STANDARD_TEXT = "standard_text"


@dataclass
class DataArguments:
    """Where text comes from and how it is cut."""

    train_files: list[str] = field(
        default_factory=list, metadata={"help": "txt (one document per file), jsonl, parquet"}
    )
    validation_files: list[str] = field(default_factory=list)
    dataset_name: str | None = field(
        default=None,
        metadata={"help": f"a data set on the Hub instead of files; {STANDARD_TEXT!r} is text that Python carries"},
    )
    dataset_config: str | None = None
    train_split: str = "train"
    validation_split: str | None = "validation"
    validation_fraction: float = field(
        default=0.1, metadata={"help": "without validation text: the share of the last training rows held out"}
    )
    text_column: str = "text"
    max_validation_rows: int | None = field(default=None, metadata={"help": "evaluate on the first rows only"})
    streaming: bool = False
    shuffle_buffer: int = field(
        default=2048, metadata={"help": "with streaming: rows in the shuffle buffer; 1 keeps their order"}
    )
    sequence_length: int = 1024
    tokenizer: str | None = field(default=None, metadata={"help": "name or folder; without it one is trained"})
    tokenizer_vocab_size: int = 4096
    preprocessing_workers: int | None = None

    def __post_init__(self):
        check_either(self, "train_files", "dataset_name")
        check_least(self, 2, "sequence_length")
        check_least(self, 1, "shuffle_buffer", "max_validation_rows")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must lie between 0 and 1.")


def load_documents(data: DataArguments) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]:
    """Training and validation documents, one per row, in the column `text_column`; validation may be None.

    Raises:
        FileNotFoundError: a file name or pattern matches nothing.
        ValueError: files of an unknown kind, or without the text column.
    """
    if data.dataset_name == STANDARD_TEXT:
        train, validation = standard_documents()
    elif data.dataset_name is not None:
        options = {"streaming": data.streaming}
        train = load_dataset(data.dataset_name, data.dataset_config, split=data.train_split, **options)
        validation = None
        if data.validation_split is not None:
            validation = load_dataset(data.dataset_name, data.dataset_config, split=data.validation_split, **options)
    else:
        train = documents_of_files(data.train_files, streaming=data.streaming)
        validation = documents_of_files(data.validation_files) if data.validation_files else None
    for documents in (train, validation):
        if isinstance(documents, Dataset):
            check_texts(documents, [data.text_column], f"text_column={data.text_column!r}")
        elif documents is not None and documents.column_names is not None:
            check_columns(documents, [data.text_column], f"text_column={data.text_column!r}")
    return train, validation


def documents_of_files(patterns: Iterable[str], *, streaming: bool = False) -> Dataset | IterableDataset:
    """The documents of local files of one kind: a text file is one document, other files have one per row.

    Files may have columns of their own: what a file lacks is None.
    """
    paths = paths_of(patterns)
    kinds = {LOADERS.get(Path(path).suffix) for path in paths}
    if len(kinds) != 1 or None in kinds:
        raise ValueError(f"files must all be of one kind of {sorted(LOADERS)}, got {paths}.")
    kind = kinds.pop()
    if all(Path(path).stat().st_size == 0 for path in paths):
        raise ValueError(f"{paths} hold nothing: every file is empty.")
    options: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
    try:
        return load_dataset(kind, data_files=paths, split="train", streaming=streaming, **options)
    except ValueError as error:  # what `datasets` says of a file without rows names no file
        raise ValueError(f"{paths}: {error}") from error
    except DatasetGenerationError as error:  # it reads files as one table
        if len(paths) == 1:
            raise ValueError(f"{paths}: {error.__cause__ or error}") from error
        return concatenate_datasets([documents_of_files([path]) for path in paths])


def paths_of(patterns: Iterable[str]) -> list[str]:
    """The files of some names and patterns, pattern by pattern, sorted within each.

    Raises:
        FileNotFoundError: one matches nothing.
    """
    paths: list[str] = []
    for pattern in patterns:
        found = sorted(glob(pattern, recursive=True))
        if not found:
            raise FileNotFoundError(f"no file matches {pattern!r}.")
        paths.extend(found)
    return paths


def get_tokenizer(
    data: DataArguments, documents: Dataset | IterableDataset, model: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer named in the settings; else that of the `model` to continue with; else, for a new model, a
    byte-level BPE trained on the documents.

    Raises:
        ValueError: there is none under that name, or it has no end-of-text token.
    """
    if (name := data.tokenizer or model) is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            remedy = "" if data.tokenizer else " Give tokenizer=FOLDER, the one that the model was trained with."
            raise ValueError(f"{name!r} holds no tokenizer.{remedy}") from error
        check_ends(tokenizer, name)
        return tokenizer
    texts = (document[data.text_column] for document in islice(documents, 100_000))
    return train_tokenizer(texts, data.tokenizer_vocab_size)


def check_ends(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Documents can be told apart.

    Raises:
        ValueError: the tokenizer has no token that ends them.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer={name!r} has no end-of-text token, which must end documents.")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: there are no unknown tokens."""
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


def ending_texts(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, ending each text with the end-of-text token, as T5's does: an encoder-decoder is trained with
    these ends, and whoever makes inputs and labels later has them too."""
    if tokenizer("a")["input_ids"][-1:] != [tokenizer.eos_token_id]:
        tokenizer.add_bos_token, tokenizer.add_eos_token = False, True
    return tokenizer


def _in_pieces(texts: Iterable[str], size: int = 100_000) -> Iterator[str]:
    """A whole book at once would be a single unit of work for the trainer."""
    for text in texts:
        yield from (text[start : start + size] for start in range(0, len(text), size))


def begin_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token every document is read from: the beginning-of-text token, or the end-of-text token if there is none.

    lm-eval uses the same one as context of a text's first token, and `generate()` without a prompt starts from it.
    """
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The texts' tokens alone, without special ones.

    Raises:
        ValueError: one is not a text, which streamed rows say only now.
    """
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"row {number} of {len(texts)} read together holds {text!r} where a text was expected.")
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
