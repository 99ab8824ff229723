"""Generate ListOps of the Long Range Arena.

Nested operations on digits, generated as the arena generates them.

    python recipes/listops.py FOLDER [--rows 96000 2000 2000] [--seed 0] [--min-length 500] [--max-length 2000]

Writes FOLDER/listops-1000/basic_{train,val,test}.tsv, as in the arena's archive.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from _lib.entry import guarded

from tqdm import tqdm

from hf_hybrid_ssm.cli.settings import as_flags

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
VALUE_PROBABILITY = 0.75
SPLITS = ("train", "val", "test")


class _TooLong(Exception):
    pass


def draw(choose: random.Random, max_length: int, max_depth: int = 10, max_args: int = 10) -> tuple[str, int, int]:
    """A random tree: its text in the arena's fully bracketed form, its value, its length.

    A value has length 1, an operation 2 and what its arguments have. The text is `""` where the length would reach
    `max_length`.
    """
    length = 0

    def node(depth: int) -> tuple[str, int]:
        nonlocal length
        if depth == max_depth or choose.random() < VALUE_PROBABILITY:
            length += 1
            value = choose.randrange(10)
            return str(value), value
        length += 2
        count = choose.randint(2, max_args)
        operator = choose.choice(list(OPERATORS))
        text, values = operator, []
        for _ in range(count):
            if length >= max_length:
                raise _TooLong
            argument, value = node(depth + 1)
            text = f"( {text} {argument} )"
            values.append(value)
        return f"( {text} {END} )", OPERATORS[operator](values)

    try:
        text, value = node(1)
    except _TooLong:
        return "", 0, max_length
    return ("", 0, length) if length >= max_length else (text, value, length)


def trees(rows: int, seed: int, min_length: int = 500, max_length: int = 2000, **sizes: int) -> list[tuple[str, int]]:
    """Distinct trees with `min_length` < length < `max_length`, as (text, value)."""
    choose = random.Random(seed)
    found: dict[str, int] = {}
    with tqdm(total=rows, desc="ListOps") as progress:
        while len(found) < rows:
            text, value, length = draw(choose, max_length, **sizes)
            if text and length > min_length and text not in found:
                found[text] = value
                progress.update()
    return list(found.items())


def write(
    folder: str | Path, rows: tuple[int, int, int] = (96_000, 2_000, 2_000), seed: int = 0, **sizes: int
) -> Path:
    """The three files, cut in turn out of one set; returns their folder.

    Raises:
        FileExistsError: one is there already.
    """
    path = Path(folder) / "listops-1000"
    if there := [file for split in SPLITS if (file := path / f"basic_{split}.tsv").exists()]:
        raise FileExistsError(f"{there[0]} is there already: name another folder, or remove it.")
    path.mkdir(parents=True, exist_ok=True)
    found, start = trees(sum(rows), seed, **sizes), 0
    for split, count in zip(SPLITS, rows):
        lines = [f"{text}\t{value}\n" for text, value in found[start : start + count]]
        (path / f"basic_{split}.tsv").write_text("Source\tTarget\n" + "".join(lines), encoding="utf-8")
        start += count
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, nargs=3, default=(96_000, 2_000, 2_000))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-length", type=int, default=500)
    parser.add_argument("--max-length", type=int, default=2000)
    given = parser.parse_args(as_flags(sys.argv[1:]))
    print(write(given.folder, tuple(given.rows), given.seed, min_length=given.min_length, max_length=given.max_length))


if __name__ == "__main__":
    guarded("listops.py", main)
