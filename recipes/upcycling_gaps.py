"""Measure how far students are behind their teacher.

By the share of attention they keep; and what their start is worth.

    python recipes/upcycling_gaps.py recipes/configs/upcycle/gaps_cpu.yaml [key=value ...]

`base` holds settings of upcycle.py, each of `variants` what differs; a variant with `from_scratch: true` is the
student of the same shape that learns the next token from random weights on as many tokens, and one with
`teacher_goes_on: true` is the teacher itself, which goes on learning on as many: the control for the text that the
students read. With `intermediate_size` its feed-forward layers are first made wider by units that start at zero: the
control for their parameters, too. Each run's loss is measured on every kind of text in `files`, at the training length
and, on the same tokens, in windows `factor` times as long. With `reference`, differences to that variant are paired by
seed. A killed comparison goes on with the runs it lacks. Writes upcycling_gaps.json and .png to `output_dir`, and both
to `results` (a path without extension).
"""

import statistics
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib.checks import check_least, check_named
from _lib.documents import DataArguments, documents_of_files
from _lib.entry import start
from _lib.intervals import half_width, mean_of, plus_minus
from _lib.plotting import SPREAD, panels, style
from _lib.scoring import loss_at, rows_within
from _lib.settings import filled
from _lib.sweeps import check_claim, claim
from _lib.training import perplexity, say, write_json, write_with_picture

import torch
from compare import merged
from matplotlib.figure import Figure
from pretrain_clm import ModelArguments, pretrain
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainingArguments
from upcycle import STAGES, UpcycleArguments, planned, upcycle_model

from hf_hybrid_ssm.hub.reading import read_json
from hf_hybrid_ssm.hub.whole_models import load_whole
from hf_hybrid_ssm.upcycle import load_teacher
from hf_hybrid_ssm.upcycle.loading import open_teacher
from hf_hybrid_ssm.upcycle.measurements import cache_bytes

STATE_LENGTH = 32_768  # tokens of the decoded sequence whose cache is counted


@dataclass
class GapArguments:
    """Which students to make of one teacher."""

    base: dict[str, Any] = field(metadata={"help": "settings of upcycle.py"})
    variants: dict[str, dict[str, Any]] = field(
        metadata={
            "help": "name: settings that differ, from_scratch: true or teacher_goes_on: true (and intermediate_size)"
        }
    )
    files: dict[str, list[str]] = field(metadata={"help": "kind: held-out text to score: txt, jsonl or parquet"})
    reference: str | None = field(default=None, metadata={"help": "the variant that differences are taken to"})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    factor: int = field(default=8, metadata={"help": "of the training length, for the second loss"})
    scored_tokens: int = field(default=65_536, metadata={"help": "of each kind at most"})
    output_dir: str = "runs/upcycling-gaps"
    results: str | None = field(default=None, metadata={"help": "another path, without extension, for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        check_named(self, "variants", "seeds")
        if not isinstance(self.files, dict) or not self.files:
            raise ValueError(
                f"files={self.files!r} must map one kind of text or more to its files: {{novels: [...]}}."
            )
        check_least(self, 2, "factor")
        if self.reference is not None and self.reference not in self.variants:
            raise ValueError(f"reference={self.reference!r} must be one of variants={list(self.variants)}.")
        for name, over in self.variants.items():
            if "intermediate_size" in over and not over.get("teacher_goes_on"):
                raise ValueError(f"variants: {name!r} has an intermediate_size without teacher_goes_on: true.")


def widened(teacher: PreTrainedModel, intermediate_size: int) -> PreTrainedModel:
    """The same function with feed-forward layers of this width: what is added gives zero until it is trained.

    Raises:
        ValueError: the teacher's are not narrower.
    """
    config = deepcopy(teacher.config)
    if intermediate_size <= config.intermediate_size:
        raise ValueError(
            f"intermediate_size={intermediate_size} must be above the teacher's, {config.intermediate_size}."
        )
    config.intermediate_size = intermediate_size
    wide = type(teacher)(config)
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            given = teacher.get_parameter(name)
            if parameter.shape != given.shape and name.endswith("down_proj.weight"):
                parameter.zero_()
            parameter[tuple(slice(size) for size in given.shape)] = given
    return wide


def run_one(arguments: GapArguments, name: str, seed: int) -> Path:
    """Make one student, if that was not done; returns its folder."""
    folder = Path(arguments.output_dir) / f"{name}-{seed}"
    if (folder / "results.json").is_file():
        return folder
    over = dict(arguments.variants[name])
    from_scratch, goes_on = over.pop("from_scratch", False), over.pop("teacher_goes_on", False)
    intermediate_size = over.pop("intermediate_size", None)
    settings = merged(arguments.base, over) | {"seed": seed, "output_dir": str(folder)}
    given = filled((UpcycleArguments, DataArguments, TrainingArguments), settings)
    upcycling, data, training = given
    if not (from_scratch or goes_on):
        upcycling.overwrite = arguments.overwrite
        upcycle_model(upcycling, data, training)
        return folder
    stages = [getattr(upcycling, stage) for stage in STAGES if getattr(upcycling, stage) is not None]
    training.max_steps = sum(stage["max_steps"] for stage in stages)
    training.learning_rate = stages[-1]["learning_rate"]
    data.tokenizer = data.tokenizer or upcycling.teacher
    start = Path(arguments.output_dir) / f"start-{name}-{seed}"
    torch.manual_seed(seed)
    if from_scratch:
        config = planned(open_teacher(upcycling.teacher).config, upcycling.student())
        AutoModelForCausalLM.from_config(config).save_pretrained(start)
    elif intermediate_size is not None:
        teacher = load_teacher(upcycling.teacher, torch.float32).model
        widened(teacher, intermediate_size).save_pretrained(start)
    else:
        start = Path(upcycling.teacher)
    going_on = {"overwrite": True} if arguments.overwrite else {"resume": "auto"}
    pretrain(ModelArguments(model_name_or_path=str(start), **going_on), data, training)
    return folder


def held_out_rows(arguments: GapArguments, tokenizer: Any, length: int) -> dict[str, torch.Tensor]:
    """kind → rows (N, factor x length) from inside one document each."""
    longest, found = arguments.factor * length, {}
    for kind, files in arguments.files.items():
        rows = list(rows_within(documents_of_files(files)["text"], tokenizer, longest))
        if not rows:
            raise ValueError(f"factor={arguments.factor}: no document of {kind}, {files}, has {longest} tokens.")
        found[kind] = torch.tensor(rows[: max(1, arguments.scored_tokens // longest)])
    return found


def measure(folder: str | Path, rows: dict[str, torch.Tensor], length: int) -> dict[str, Any]:
    """Losses at both lengths, by kind of text and their means, and the bytes of the cache of one long sequence."""
    model = load_whole(AutoModelForCausalLM, folder, dtype=torch.float32).eval()
    short = {kind: loss_at(model, held, length, length) for kind, held in rows.items()}
    long = {kind: loss_at(model, held, held.shape[1], length) for kind, held in rows.items()}
    return {
        "parameters": model.num_parameters(),
        "losses": short,
        "loss": statistics.mean(short.values()),
        "losses_in_long_windows": long,
        "loss_in_long_windows": statistics.mean(long.values()),
        "cache_bytes": cache_bytes(model.config, [STATE_LENGTH], "bfloat16")[0],
    }


def gaps(arguments: GapArguments) -> dict[str, Any]:
    length, teacher = arguments.base["sequence_length"], arguments.base["teacher"]
    claimed = {"base": arguments.base, "variants": arguments.variants}
    check_claim(arguments.output_dir, claimed, arguments.overwrite)
    rows = held_out_rows(arguments, AutoTokenizer.from_pretrained(teacher), length)
    claim(arguments.output_dir, claimed, arguments.overwrite, "*/results.json")
    figures: dict[str, Any] = {
        "settings": {name: getattr(arguments, name) for name in ("base", "variants", "seeds", "reference")},
        "scored_tokens": {kind: held.numel() for kind, held in rows.items()},
        "teacher": measure(teacher, rows, length),
        "students": {},
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.variants}
    for seed in arguments.seeds:  # seed by seed, so that a comparison cut short is still fair
        for name in arguments.variants:
            folder = run_one(arguments, name, seed)
            known = read_json(folder / "results.json")
            kept = {key: known[key] for key in ("loss_before_training", "tokens") if key in known}
            runs[name].append({"seed": seed} | kept | measure(folder, rows, length))
            figures["students"] = {name: summary(found, figures["teacher"]) for name, found in runs.items() if found}
            if arguments.reference is not None and runs[arguments.reference]:
                figures["differences"] = differences(runs, arguments.reference)
            write_json(Path(arguments.output_dir) / "upcycling_gaps.json", figures)
    picture = partial(draw, figures)
    write_with_picture(figures, picture, Path(arguments.output_dir) / "upcycling_gaps", arguments.results)
    say(table(figures))
    return figures


def differences(runs: dict[str, list[dict[str, Any]]], reference: str) -> dict[str, Any]:
    """Loss minus the reference's, by pairs of a seed: mean and half the width of its 95 % interval, by kind too."""
    found = {}
    for name in runs:
        pairs = list(zip(runs[name], runs[reference]))
        if name == reference or not pairs:
            continue
        by_kind = {
            kind: [one["losses"][kind] - other["losses"][kind] for one, other in pairs]
            for kind in pairs[0][0]["losses"]
        }
        whole = [one["loss"] - other["loss"] for one, other in pairs]
        found[name] = mean_of(whole) | {"by_kind": {kind: mean_of(gaps) for kind, gaps in by_kind.items()}}
        found[name]["pairs"] = whole
    return found


def summary(runs: list[dict[str, Any]], teacher: dict[str, Any]) -> dict[str, Any]:
    """Means over the seeds, their spread, and perplexity over the teacher's."""
    found: dict[str, Any] = {"cache_bytes": runs[0]["cache_bytes"], "runs": runs}
    for key in ("loss", "loss_in_long_windows"):
        losses = [run[key] for run in runs]
        found[key] = statistics.mean(losses)
        found[f"{key}_standard_deviation"] = statistics.stdev(losses) if len(losses) > 1 else None
    found["perplexity_over_teachers"] = perplexity(found["loss"] - teacher["loss"])
    return found


def half_width_over_seeds(found: dict[str, Any], key: str) -> float | None:
    """Half the 95 % interval of a mean over a student's runs; None for the teacher, which is one model."""
    return half_width([run[key] for run in found.get("runs", ())])


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| model | loss, 95 % | perplexity over the teacher's | loss in long windows | cache at 32,768 tokens, KiB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    rows = {"teacher": figures["teacher"] | {"perplexity_over_teachers": 1.0}} | figures["students"]
    for name, found in rows.items():
        cells = [
            f"{found['loss']:.3f}{plus_minus(half_width_over_seeds(found, 'loss'), 3)}",
            f"{found['perplexity_over_teachers']:.3f}",
            f"{found['loss_in_long_windows']:.3f}",
            f"{found['cache_bytes'] / 1024:,.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(figures: dict[str, Any]) -> Figure:
    """Losses of teacher and students, a line each, in windows as in training and in longer ones."""
    figure, (axes,) = panels("How far behind its teacher is a student?")
    models = {"teacher": figures["teacher"], **figures["students"]}
    length = figures["settings"]["base"]["sequence_length"]
    labels = {"loss": f"windows of {length:,}, as in training", "loss_in_long_windows": "longer windows"}
    for number, (key, label) in enumerate(labels.items()):
        losses = [found[key] for found in models.values()]
        spread = [half_width_over_seeds(found, key) or 0.0 for found in models.values()]
        axes.errorbar(losses, list(models), xerr=spread, capsize=3, label=label, **style(number, linestyle=""))
    axes.set(xlabel="held-out loss (nats per token)")
    axes.set_title(SPREAD, loc="left", fontsize=9)
    return figure


if __name__ == "__main__":
    start("upcycling_gaps.py", gaps, GapArguments)
