"""Measure perplexity far beyond the training length.

The same held-out tokens are read in windows of more and more tokens.

    python recipes/length_extrapolation.py recipes/configs/length/books_cpu.yaml [key=value ...]

`models` names trained checkpoints, which `read_as` may load with another configuration; `variants` are trained first,
by pretrain_clm.py with the settings of `base` and what differs, unless a stopped call has done it. Every length is
scored on exactly the same tokens, so that only the context changes. Writes length_extrapolation.json and .png to
`output_dir`, and both to `results` (a path without extension).
"""

import math
import statistics
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib.checks import check_known, check_models, check_named, check_texts, check_vocabulary
from _lib.documents import documents_of_files
from _lib.entry import start
from _lib.intervals import half_width_of
from _lib.plotting import perplexity_by_length
from _lib.scoring import loss_at, rows_within
from _lib.sweeps import check_claim, claim
from _lib.training import perplexity, say, write_with_picture

import torch
from compare import merged, parsed, run
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.hub.whole_models import load_whole


@dataclass
class ExtrapolationArguments:
    """Which models to score on which text, at which lengths."""

    files: list[str] = field(metadata={"help": "held-out text: txt, jsonl or parquet"})
    lengths: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048, 4096, 8192])
    train_length: int = field(default=256, metadata={"help": "marked in the picture; `variants` train at it"})
    scored_tokens: int = field(default=65_536, metadata={"help": "about so many, from all documents alike"})
    models: dict[str, list[str]] = field(
        default_factory=dict, metadata={"help": "name: checkpoints (such as seeds) to average over"}
    )
    read_as: dict[str, dict[str, Any]] = field(
        default_factory=dict,
        metadata={"help": "name of one of `models`: fields that its configuration has instead, such as model_type"},
    )
    base: dict[str, Any] = field(default_factory=dict, metadata={"help": "settings of pretrain_clm.py"})
    variants: dict[str, dict[str, Any]] = field(default_factory=dict, metadata={"help": "name: settings that differ"})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "of the variants"})
    text_column: str = "text"
    output_dir: str = "runs/length-extrapolation"
    results: str | None = field(default=None, metadata={"help": "another path, without extension, for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        self.lengths = sorted(set(self.lengths))
        if not self.lengths or self.lengths[0] < 2 or any(self.lengths[-1] % length for length in self.lengths):
            raise ValueError(f"lengths={self.lengths} must be at least 2 and divide the longest of them.")
        if self.scored_tokens < self.lengths[-1]:
            raise ValueError(f"scored_tokens={self.scored_tokens} must be at least the longest of lengths.")
        if not self.models and not self.variants:
            raise ValueError("give models (trained checkpoints) or variants (to train first).")
        check_named(self, *(["seeds"] if self.variants else []))
        check_known("read_as", self.read_as, self.models)
        check_models(self.models)


def folders_of(arguments: ExtrapolationArguments, name: str) -> list[str]:
    """Where a variant's checkpoints are, one per seed."""
    return [str(Path(arguments.output_dir) / f"{name}-{seed}") for seed in arguments.seeds]


def runs_of(arguments: ExtrapolationArguments) -> dict[Path, dict[str, Any]]:
    """Folder → settings of the variants' runs, all of which can be read: a wrong last one cannot cost the first one's
    hours."""
    runs = {}
    for name, over in arguments.variants.items():
        for seed, folder in zip(arguments.seeds, folders_of(arguments, name), strict=True):
            each = merged(arguments.base, over) | {"seed": seed, "sequence_length": arguments.train_length}
            parsed(Path(folder), each)
            runs[Path(folder)] = each
    return runs


def rows_of(arguments: ExtrapolationArguments, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Rows (N, longest length) from inside one document each, taken from the documents in turn."""
    longest = arguments.lengths[-1]
    wanted = arguments.scored_tokens // longest
    documents = []
    for text in documents_of_files(arguments.files)[arguments.text_column]:
        documents.append(torch.tensor(list(rows_within([text], tokenizer, longest))))
    turns = max((len(rows) for rows in documents), default=0)
    rows = [rows[turn] for turn in range(turns) for rows in documents if turn < len(rows)][:wanted]
    if len(rows) < wanted:
        raise ValueError(
            f"scored_tokens={arguments.scored_tokens} takes {wanted} pieces of {longest} tokens; the documents of "
            f"{arguments.files} hold {len(rows)}."
        )
    return torch.stack(rows)


def load(checkpoint: str, fields: dict[str, Any]) -> PreTrainedModel:
    """The checkpoint's model in float32; with `fields`, its weights read by a configuration that has these instead.

    Raises:
        ValueError: a model so read leaves weights of the checkpoint out, or lacks some.
    """
    known = AutoConfig.from_pretrained(checkpoint)
    if not fields:
        return load_whole(AutoModelForCausalLM, checkpoint, dtype=torch.float32)
    values = {key: value for key, value in known.to_dict().items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(**{"model_type": known.model_type} | values | fields)
    try:
        return load_whole(AutoModelForCausalLM, checkpoint, config=config, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(f"read_as={fields} does not fit the weights of {checkpoint}: {error}") from error


def curve_of(
    checkpoint: str, arguments: ExtrapolationArguments, fields: dict[str, Any] | None = None
) -> tuple[list[float], int]:
    """The loss at each length, and how many tokens were scored."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = load(checkpoint, fields or {}).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    check_vocabulary(model, tokenizer)
    rows = rows_of(arguments, tokenizer)
    shortest = arguments.lengths[0]
    lengths = tqdm(arguments.lengths, desc=Path(checkpoint).name)
    return [loss_at(model, rows, length, shortest) for length in lengths], rows.numel() * (shortest - 1) // shortest


def summary(curves: list[list[float]], scored: int, arguments: ExtrapolationArguments) -> dict[str, Any]:
    means = [statistics.mean(losses) for losses in zip(*curves)]
    spread = [statistics.stdev(losses) if len(curves) > 1 else None for losses in zip(*curves)]
    points = [
        {"length": length, "loss": loss, "perplexity": perplexity(loss), "standard_deviation_of_loss": deviation}
        for length, loss, deviation in zip(arguments.lengths, means, spread)
    ]
    at_training = min(arguments.lengths, key=lambda length: abs(math.log(length / arguments.train_length)))
    factor = math.exp(means[-1] - means[arguments.lengths.index(at_training)])
    return {
        "checkpoints": len(curves),
        "scored_tokens": scored,
        "points": points,
        "perplexity_at_the_longest_over_training_length": factor,
    }


def length_extrapolation(arguments: ExtrapolationArguments) -> dict[str, Any]:
    held_out = documents_of_files(arguments.files)
    check_texts(held_out, [arguments.text_column], "text_column")
    settings = {name: getattr(arguments, name) for name in ("base", "variants", "train_length")}
    check_claim(arguments.output_dir, settings, arguments.overwrite)
    runs = runs_of(arguments)
    claim(arguments.output_dir, settings, arguments.overwrite, "*/results.json")
    for folder, each in runs.items():
        run(folder, each)
    trained = {name: folders_of(arguments, name) for name in arguments.variants}
    models = arguments.models | trained
    figures: dict[str, Any] = {"train_length": arguments.train_length, "models": {}}
    if arguments.variants:
        figures["settings"] = {"base": arguments.base, "variants": arguments.variants, "seeds": arguments.seeds}
    for name, checkpoints in models.items():
        fields = arguments.read_as.get(name)
        found = [curve_of(checkpoint, arguments, fields) for checkpoint in checkpoints]
        figures["models"][name] = summary([curve for curve, _ in found], found[0][1], arguments)
    picture = partial(draw, figures)
    write_with_picture(figures, picture, Path(arguments.output_dir) / "length_extrapolation", arguments.results)
    say(table(figures))
    return figures


def table(figures: dict[str, Any]) -> str:
    first = next(iter(figures["models"].values()))
    lines = [f"| perplexity at | {' | '.join(str(point['length']) for point in first['points'])} |"]
    lines.append("| --- |" + " ---: |" * len(first["points"]))
    for name, found in figures["models"].items():
        values = [f"{point['perplexity']:.2f}" for point in found["points"]]
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines)


def draw(figures: dict[str, Any]) -> Figure:
    curves = {
        name: [
            point | {"half_width_of_loss": half_width_of(point["standard_deviation_of_loss"], found["checkpoints"])}
            for point in found["points"]
        ]
        for name, found in figures["models"].items()
    }
    question = "Does perplexity stay low beyond the length of training?"
    return perplexity_by_length(question, curves, figures["train_length"])


if __name__ == "__main__":
    start("length_extrapolation.py", length_extrapolation, ExtrapolationArguments)
