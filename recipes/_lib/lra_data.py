"""The six tasks of the Long Range Arena (arXiv 2011.04006): readers for its archive's layout and for local files.

Every reader gives the splits train, validation and test, with `input_ids` (for pairs: two lists) and `label`.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _lib.checks import check_columns, check_labels, check_texts

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset

PAD, END, UNKNOWN = 0, 1, 2  # of ListOps; bytes of text are padded with 0, which no text contains
SYMBOLS = ("[MIN", "[MAX", "[MED", "[SM", "X", *map(str, range(10)))
LISTOPS = {symbol: number for number, symbol in enumerate(SYMBOLS, start=3)}
ARCHIVE = ("", "lra_release", "lra_release/lra_release")


@dataclass(frozen=True)
class Task:
    """A task: the longest input, the classes, and what reads it from a folder."""

    length: int
    num_labels: int
    read: Callable[[Path, int], DatasetDict]
    paired: bool = False


def in_folder(folder: Path, *names: str) -> Path:
    """The first of `names` in the folder, or in the folders that the arena's archive unpacks to.

    Raises:
        FileNotFoundError: none is there.
    """
    for name in names:
        for inside in ARCHIVE:
            if (path := folder / inside / name).exists():
                return path
    raise FileNotFoundError(f"{folder} holds none of {list(names)}, neither itself nor in lra_release.")


def listops_ids(source: str, length: int) -> list[int]:
    """Tokens without round brackets, `]` as X, and an end token; at most `length`."""
    tokens = source.replace("(", " ").replace(")", " ").replace("]", "X").split()
    return [*(LISTOPS.get(token, UNKNOWN) for token in tokens[: length - 1]), END]


def read_listops(folder: Path, length: int) -> DatasetDict:
    path = in_folder(folder, "listops-1000", "listops")
    splits = DatasetDict()
    for split, name in (("train", "train"), ("validation", "val"), ("test", "test")):
        if not (file := path / f"basic_{name}.tsv").is_file():
            raise FileNotFoundError(f"{path} must hold {file.name}; python recipes/listops.py {folder} writes it.")
        head, *lines = file.read_text(encoding="utf-8").splitlines()
        if head.split("\t") != ["Source", "Target"]:
            raise ValueError(f"{file} must have the columns Source and Target, got {head[:80]!r}.")
        rows = [line.split("\t") for line in lines]
        ids = [listops_ids(source, length) for source, _ in rows]
        splits[split] = Dataset.from_dict({"input_ids": ids, "label": [int(target) for _, target in rows]})
    return splits


def byte_ids(text: str, length: int) -> list[int]:
    return list(text.encode("utf-8")[:length]) or [PAD + 1]


def read_text(folder: Path, length: int) -> DatasetDict:
    """{train,test}.jsonl with text and label; as in the arena the test set serves for validation too."""
    train, test = (
        in_folder(folder, "train.jsonl", "imdb/train.jsonl"),
        in_folder(folder, "test.jsonl", "imdb/test.jsonl"),
    )
    rows = load_dataset("json", data_files={"train": str(train), "test": str(test)})
    for split in rows:
        check_columns(rows[split], ("text", "label"), f"{folder} {split}")
        check_texts(rows[split], ["text"], f"{folder} {split}")
    rows = rows.map(
        lambda batch: {"input_ids": [byte_ids(text, length) for text in batch["text"]]},
        batched=True,
        remove_columns=[name for name in rows["train"].column_names if name != "label"],
    )
    return DatasetDict(train=rows["train"], validation=rows["test"], test=rows["test"])


def read_retrieval(folder: Path, length: int) -> DatasetDict:
    """new_aan_pairs.{train,eval,test}.tsv: label, two names, two texts, without a head."""
    path = in_folder(folder, "tsv_data", "new_aan_pairs.train.tsv")
    path = path if path.is_dir() else path.parent
    splits = DatasetDict()
    for split, name in (("train", "train"), ("validation", "eval"), ("test", "test")):
        file = path / f"new_aan_pairs.{name}.tsv"
        if not file.is_file():
            raise FileNotFoundError(f"{path} must hold {file.name}.")
        # the file's time is part of what the cached rows are known by
        given = {"file": file, "length": length, "written": file.stat().st_mtime_ns}
        splits[split] = Dataset.from_generator(_pairs, gen_kwargs=given)
    return splits


def _pairs(file: Path, length: int, written: int) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(100_000_000)
    with open(file, encoding="utf-8", newline="") as lines:
        for number, fields in enumerate(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
            if len(fields) != 5:
                raise ValueError(f"{file}, line {number}: five columns are needed, got {len(fields)}.")
            yield {"input_ids": [byte_ids(text, length) for text in fields[3:]], "label": int(float(fields[0]))}


def read_image(folder: Path, length: int) -> DatasetDict:
    """{train,test}.parquet with pixels and label; a tenth of the training images, drawn with seed 0, validates."""
    names = ("train.parquet", "cifar10_gray/train.parquet"), ("test.parquet", "cifar10_gray/test.parquet")
    files = {split: str(in_folder(folder, *each)) for split, each in zip(("train", "test"), names)}
    rows = load_dataset("parquet", data_files=files)
    for split in rows:
        check_columns(rows[split], ("pixels", "label"), f"{folder} {split}")
        if (size := len(rows[split][0]["pixels"])) != length:
            raise ValueError(f"{folder} {split}: an image has {size} pixels, {length} are needed.")
    rows = rows.rename_column("pixels", "input_ids")
    parts = rows["train"].train_test_split(0.1, seed=0)
    return DatasetDict(train=parts["train"], validation=parts["test"], test=rows["test"])


def read_pathfinder(name: str) -> Callable[[Path, int], DatasetDict]:
    """The reader of pathfinder32 or pathfinder128, hardest level: PNG files, and lists of them in metadata/*.npy."""

    def read(folder: Path, length: int) -> DatasetDict:
        level = in_folder(folder, f"{name}/curv_contour_length_14", "curv_contour_length_14")
        paths, labels = [], []
        for listing in sorted((level / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.stem)):
            for line in listing.read_text(encoding="utf-8").splitlines():
                fields = line.split()
                path = level / fields[0] / fields[1]
                if path.is_file() and path.stat().st_size:  # the arena's archive has an empty image
                    paths.append(str(path))
                    labels.append(int(fields[3]))
        if not paths:
            raise FileNotFoundError(f"{level}/metadata/*.npy must list images in {level}/imgs.")
        pixels(paths[0], length)
        rows = Dataset.from_dict({"path": paths, "label": labels})
        parts = rows.train_test_split(0.2, seed=0)
        held_out = parts["test"].train_test_split(0.5, seed=0)
        splits = DatasetDict(train=parts["train"], validation=held_out["train"], test=held_out["test"])
        return splits.with_transform(lambda batch: _decoded(batch, length))

    return read


def _decoded(batch: dict[str, list], length: int) -> dict[str, list]:
    found: dict[str, list] = {"label": batch["label"]} if "label" in batch else {}
    return found | ({"input_ids": [pixels(path, length) for path in batch["path"]]} if "path" in batch else {})


def pixels(path: str, length: int) -> list[int]:
    """A grey image, row by row."""
    from PIL import Image

    values = np.asarray(Image.open(path).convert("L")).reshape(-1)
    if len(values) != length:
        raise ValueError(f"{path} has {len(values)} pixels, {length} are needed.")
    return values.tolist()


TASKS = {
    "listops": Task(2048, 10, read_listops),
    "text": Task(4000, 2, read_text),
    "retrieval": Task(4000, 2, read_retrieval, paired=True),
    "image": Task(1024, 10, read_image),
    "pathfinder": Task(1024, 2, read_pathfinder("pathfinder32")),
    "pathx": Task(16384, 2, read_pathfinder("pathfinder128")),
}


def load_task(name: str, folder: str | Path, length: int | None = None) -> DatasetDict:
    """The splits of a task, with texts and trees cut to `length` (of images: checked against it)."""
    task = TASKS[name]
    splits = task.read(Path(folder), length or task.length)
    for split, rows in splits.items():
        labels = rows.with_format(None)["label"]
        if not len(labels):
            raise ValueError(f"{folder}: {split} of {name} is empty.")
        check_labels(labels, task.num_labels, f"{name} {split}")
    return splits


def collate(rows: list[dict[str, Any]], paired: bool, separator: int | None = None) -> dict[str, Any]:
    """Rows → `input_ids`, `attention_mask`, `labels`.

    Pairs have shape (B, 2, L) with `paired`; otherwise a pair is read as one row with `separator` between.
    """
    import torch

    texts = [row["input_ids"] for row in rows]
    if separator is not None:
        texts = [[*first, separator, *second] for first, second in texts]
    flat = [ids for pair in texts for ids in pair] if paired else texts
    longest = max(map(len, flat))
    ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in flat])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in flat])
    if paired:
        ids, mask = ids.unflatten(0, (-1, 2)), mask.unflatten(0, (-1, 2))
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["label"] for row in rows])}
