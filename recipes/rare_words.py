"""Measure the loss of rare words by their last mention.

Does a model remember a name? The words are rare in its training text.

    python recipes/rare_words.py recipes/configs/length/rare_words.yaml [key=value ...]

Mean perplexity is decided by the last few dozen tokens. A name that the training text lacks is a guess where a book
has it first, and cheap where it comes back, if the model still knows it. So: words of letters that `train_files` have
at most `most` times, in rows of held-out documents; the loss of a word is the sum over its tokens; a mention's
distance is the number of tokens since the same word began before in the row. What a model saves is the loss at the
word's first mention in the row less that at the mention. Figures are means over words, each of them the mean of its
mentions, with intervals of Student's t over words. Writes rare_words.json and .png to `output_dir`, and both to
`results` (a path without extension).
"""

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from _lib.checks import check_known, check_least, check_models, check_output, check_texts, check_vocabulary
from _lib.documents import begin_of, documents_of_files
from _lib.entry import start
from _lib.intervals import mean_of
from _lib.plotting import measured_at, panels, style
from _lib.scoring import token_losses
from _lib.training import say, write_with_picture

import torch
from length_extrapolation import load
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import hf_hybrid_ssm  # noqa: F401 - registers the families

LETTERS = 4  # of the shortest word: shorter ones are rare as parts of formulas and foreign phrases
WORD = re.compile(r"[^\W\d_]+")


@dataclass
class RareWordsArguments:
    """Which models to score on which text."""

    models: dict[str, str] = field(metadata={"help": "name: checkpoint"})
    files: list[str] = field(metadata={"help": "held-out text: txt, jsonl or parquet"})
    train_files: list[str] = field(metadata={"help": "the text that all models were trained on"})
    read_as: dict[str, dict[str, Any]] = field(
        default_factory=dict,
        metadata={"help": "name of one of `models`: fields that its configuration has instead, such as model_type"},
    )
    most: int = field(default=2, metadata={"help": "a word that train_files have more often is not rare"})
    row_length: int = field(default=4096, metadata={"help": "tokens that a model reads at a time"})
    distances: list[int] = field(
        default_factory=lambda: [1, 32, 128, 512, 4096], metadata={"help": "borders between classes of distance"}
    )
    max_rows: int | None = field(default=None, metadata={"help": "score the first rows only"})
    text_column: str = "text"
    output_dir: str = "runs/rare-words"
    results: str | None = field(default=None, metadata={"help": "another path, without extension, for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        check_least(self, 16, "row_length")
        check_least(self, 0, "most")
        if len(self.distances) < 2 or self.distances[0] < 1 or any(b <= a for a, b in pairwise(self.distances)):
            raise ValueError(f"distances={self.distances} must be at least two growing numbers, from 1 on.")
        check_known("read_as", self.read_as, self.models)
        check_models(self.models)


@dataclass
class Mention:
    """A word in a row: its tokens `begin` … `end` - 1, and where the same word began before, if it did."""

    word: str
    begin: int
    end: int
    last: int | None
    first: int
    """The number, in the row's list, of the word's first mention."""


def texts_of(files: list[str], column: str) -> list[str]:
    documents = documents_of_files(files)
    check_texts(documents, [column], "text_column")
    return [document[column] for document in documents]


def known_words(texts: Iterable[str]) -> Counter[str]:
    """How often the training text has each word; small and capital letters are told apart."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(WORD.findall(text))
    return counts


def rows_of(
    text: str, tokenizer: PreTrainedTokenizerBase, length: int, known: Counter[str], most: int
) -> list[tuple[torch.Tensor, list[Mention]]]:
    """Whole rows of a document, each from the beginning-of-text token on, with the mentions of rare words that lie
    within the row.

    A word's tokens are those that overlap its letters: a space before it is part of its first token.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    words = (found for found in WORD.finditer(text) if len(found[0]) >= LETTERS and known[found[0]] <= most)
    spans, token = [], 0
    for word in words:
        while offsets[token][1] <= word.start():
            token += 1
        end = token
        while end < len(offsets) and offsets[end][0] < word.end():
            end += 1
        spans.append((word[0], token, end))
    size, rows = length - 1, []
    for row in range(len(ids) // size):
        low, high = row * size, (row + 1) * size
        mentions: list[Mention] = []
        last: dict[str, int] = {}
        first: dict[str, int] = {}
        for name, begin, end in spans:
            if begin < low or end > high:
                continue
            begin, end = begin - low + 1, end - low + 1  # after the beginning-of-text token
            mentions.append(Mention(name, begin, end, last.get(name), first.setdefault(name, len(mentions))))
            last[name] = begin
        rows.append((torch.tensor([begin_of(tokenizer), *ids[low:high]]), mentions))
    return rows


def mean_over_words(values: dict[str, list[float]]) -> dict[str, Any]:
    """Of each word the mean of its mentions; of these the mean, and half the width of its 95 % interval."""
    means = [statistics.mean(of_word) for of_word in values.values()]
    found = mean_of(means) if means else {"mean": None, "half_width_of_95_percent": None}
    return {"mentions": sum(map(len, values.values())), "words": len(means)} | found


def classes(distances: list[int]) -> list[str]:
    return [f"{low}-{high - 1}" for low, high in pairwise(distances)]


def scored(
    arguments: RareWordsArguments, checkpoint: str, fields: dict[str, Any], known: Counter[str]
) -> dict[str, Any]:
    """A model's losses at first mentions, and by distance at others, with what it saves there."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = load(checkpoint, fields).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    check_vocabulary(model, tokenizer)
    texts = texts_of(arguments.files, arguments.text_column)
    rows = [row for text in texts for row in rows_of(text, tokenizer, arguments.row_length, known, arguments.most)]
    rows = rows[: arguments.max_rows]
    if not any(mention.last for _, mentions in rows for mention in mentions):
        raise ValueError(
            f"row_length={arguments.row_length}, most={arguments.most}: no row of {arguments.files} has a rare word "
            "twice."
        )
    names = classes(arguments.distances)
    first: dict[str, list[float]] = defaultdict(list)
    losses: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    saved: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    for ids, mentions in tqdm(rows, desc=Path(checkpoint).name):
        total = torch.cat([torch.zeros(2), token_losses(model, ids)]).double().cumsum(0)  # before token i: total[i]
        of_words = [float(total[mention.end] - total[mention.begin]) for mention in mentions]
        for mention, loss in zip(mentions, of_words, strict=True):
            if mention.last is None:
                first[mention.word].append(loss)
                continue
            distance = mention.begin - mention.last
            for name, (low, high) in zip(names, pairwise(arguments.distances), strict=True):
                if low <= distance < high:
                    losses[name][mention.word].append(loss)
                    saved[name][mention.word].append(of_words[mention.first] - loss)
    return {
        "rows": len(rows),
        "first": mean_over_words(first),
        "loss": {name: mean_over_words(found) for name, found in losses.items()},
        "saved": {name: mean_over_words(found) for name, found in saved.items()},
    }


def rare_words(arguments: RareWordsArguments) -> dict[str, Any]:
    check_output(arguments.output_dir, arguments.overwrite)
    known = known_words(texts_of(arguments.train_files, arguments.text_column))
    figures: dict[str, Any] = {
        "settings": {
            "most": arguments.most,
            "row_length": arguments.row_length,
            "distances": arguments.distances,
            "training_words": known.total(),
        },
        "models": {
            name: scored(arguments, checkpoint, arguments.read_as.get(name, {}), known)
            for name, checkpoint in arguments.models.items()
        },
    }
    picture = partial(draw, figures)
    write_with_picture(figures, picture, Path(arguments.output_dir) / "rare_words", arguments.results)
    for name, found in figures["models"].items():
        savings = (f"{name}: {each['mean']:.2f}" for name, each in found["saved"].items() if each["mean"] is not None)
        say(f"{name}: first mention {found['first']['mean']:.2f} nats, saved later {', '.join(savings)}")
    return figures


def draw(figures: dict[str, Any]) -> Figure:
    figure, (axes,) = panels("What is a name's last mention worth?")
    centres = [math.sqrt(low * high) for low, high in pairwise(figures["settings"]["distances"])]
    for number, (name, found) in enumerate(figures["models"].items()):
        points = [(x, each) for x, each in zip(centres, found["saved"].values()) if each["mean"] is not None]
        halves = [each["half_width_of_95_percent"] or 0.0 for _, each in points]
        means = [each["mean"] for _, each in points]
        axes.errorbar([x for x, _ in points], means, yerr=halves, capsize=2, label=name, **style(number))
    measured_at(axes, figures["settings"]["distances"])
    axes.set(xlabel="tokens since the last mention", ylabel="saved (nats per word)")
    return figure


if __name__ == "__main__":
    start("rare_words.py", rare_words, RareWordsArguments)
