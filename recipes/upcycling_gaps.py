"""How far behind its teacher is a student, by the share of attention it keeps, and what is its start worth?

    python recipes/upcycling_gaps.py recipes/configs/upcycle/gaps_cpu.yaml [key=value ...]

`base` holds settings of upcycle.py, each of `variants` what differs; a variant with `from_scratch: true` is the
student of the same shape that learns the next token from random weights on as many tokens, and one with
`teacher_goes_on: true` is the teacher itself, which goes on learning on as many: the control for the text that the
students read. Each run's loss is measured at the training length and, on the same tokens, in windows `factor` times as
long. A killed comparison goes on with the runs it lacks. Writes upcycling_gaps.json and .png to `output_dir`, and both
to `results` (a path without extension).
"""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _lib.documents import DataArguments, begin_of, documents_of_files, token_ids
from _lib.entry import start
from _lib.plotting import SPREAD, panels, style
from _lib.scoring import loss_at
from _lib.training import perplexity, save_figure, say, write_json, write_results
from compare import merged
from matplotlib.figure import Figure
from pretrain_clm import ModelArguments, pretrain
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments
from upcycle import STAGES, UpcycleArguments, upcycle_model

from hf_hybrid_ssm.hub.verify_files import read_json
from hf_hybrid_ssm.planning import Setup, plan
from hf_hybrid_ssm.upcycle import STUDENT_FAMILIES, student_config

STATE_LENGTH = 32_768  # tokens of the decoded sequence whose cache is counted


@dataclass
class GapArguments:
    """Which students to make of one teacher."""

    base: dict[str, Any] = field(metadata={"help": "settings of upcycle.py"})
    variants: dict[str, dict[str, Any]] = field(
        metadata={"help": "name: settings that differ, from_scratch: true or teacher_goes_on: true"}
    )
    files: list[str] = field(metadata={"help": "held-out text to score: txt, jsonl or parquet"})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    factor: int = field(default=8, metadata={"help": "of the training length, for the second loss"})
    scored_tokens: int = 65_536
    output_dir: str = "runs/upcycling-gaps"
    results: str | None = field(default=None, metadata={"help": "another path, without extension, for the figures"})

    def __post_init__(self):
        if not self.variants or not self.seeds:
            raise ValueError(f"variants={list(self.variants)} and seeds={self.seeds} must each name at least one.")
        if self.factor < 2:
            raise ValueError(f"factor={self.factor} must be at least 2.")


def run_one(arguments: GapArguments, name: str, seed: int) -> Path:
    """Make one student, if that was not done; returns its folder."""
    folder = Path(arguments.output_dir) / f"{name}-{seed}"
    if (folder / "results.json").is_file():
        return folder
    over = dict(arguments.variants[name])
    from_scratch, goes_on = over.pop("from_scratch", False), over.pop("teacher_goes_on", False)
    settings = merged(arguments.base, over) | {"seed": seed, "output_dir": str(folder)}
    given = HfArgumentParser((UpcycleArguments, DataArguments, TrainingArguments)).parse_dict(settings)
    upcycling, data, training = given
    if not (from_scratch or goes_on):
        upcycle_model(upcycling, data, training)
        return folder
    stages = [getattr(upcycling, stage) for stage in STAGES if getattr(upcycling, stage) is not None]
    training.max_steps = sum(stage["max_steps"] for stage in stages)
    training.learning_rate = stages[-1]["learning_rate"]
    data.tokenizer = data.tokenizer or upcycling.teacher
    if goes_on:
        pretrain(ModelArguments(model_name_or_path=upcycling.teacher, resume="auto"), data, training)
        return folder
    teacher = AutoConfig.from_pretrained(upcycling.teacher)
    config = student_config(teacher, upcycling.keep, upcycling.keep_as, upcycling.student, **upcycling.config)
    start = Path(arguments.output_dir) / f"start-{name}-{seed}"
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(start)
    pretrain(ModelArguments(model_name_or_path=str(start), resume="auto"), data, training)
    return folder


def held_out_rows(arguments: GapArguments, tokenizer: Any, length: int) -> torch.Tensor:
    """Rows (N, factor x length) from inside one document each."""
    longest = arguments.factor * length
    rows = []
    for document in documents_of_files(arguments.files):
        ids = [begin_of(tokenizer), *token_ids([document["text"]], tokenizer)[0]]
        rows += [ids[start : start + longest] for start in range(0, len(ids) - longest + 1, longest)]
    if not rows:
        raise ValueError(f"factor={arguments.factor}: no document of {arguments.files} has {longest} tokens.")
    return torch.tensor(rows[: max(1, arguments.scored_tokens // longest)])


def measure(folder: str | Path, rows: torch.Tensor, length: int) -> dict[str, Any]:
    """Losses at both lengths, and the bytes of the cache of one long sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = model.config if model.config.model_type in STUDENT_FAMILIES else student_config(model.config, keep=1.0)
    return {
        "loss": loss_at(model, rows, length, length),
        "loss_in_long_windows": loss_at(model, rows, rows.shape[1], length),
        "cache_bytes": plan(config, Setup(batch=1, length=STATE_LENGTH, dtype="bfloat16")).state,
    }


def gaps(arguments: GapArguments) -> dict[str, Any]:
    length, teacher = arguments.base["sequence_length"], arguments.base["teacher"]
    rows = held_out_rows(arguments, AutoTokenizer.from_pretrained(teacher), length)
    figures: dict[str, Any] = {
        "settings": {"base": arguments.base, "variants": arguments.variants, "seeds": arguments.seeds},
        "scored_tokens": rows.numel(),
        "teacher": measure(teacher, rows, length),
        "students": {},
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.variants}
    for seed in arguments.seeds:  # seed by seed, so that a comparison cut short is still fair
        for name in arguments.variants:
            folder = run_one(arguments, name, seed)
            known = read_json(folder / "results.json")
            kept = {key: known[key] for key in ("loss_before_training", "tokens", "parameters") if key in known}
            runs[name].append({"seed": seed} | kept | measure(folder, rows, length))
            figures["students"] = {name: summary(found, figures["teacher"]) for name, found in runs.items() if found}
            write_json(Path(arguments.output_dir) / "upcycling_gaps.json", figures)
    targets = [Path(arguments.output_dir) / "upcycling_gaps"] + (
        [Path(arguments.results)] if arguments.results else []
    )
    for target in targets:
        write_results(target.with_suffix(".json"), figures)
        save_figure(draw(figures), target.with_suffix(".png"))
    say(table(figures))
    return figures


def summary(runs: list[dict[str, Any]], teacher: dict[str, Any]) -> dict[str, Any]:
    """Means over the seeds, their spread, and perplexity over the teacher's."""
    found: dict[str, Any] = {"cache_bytes": runs[0]["cache_bytes"], "runs": runs}
    for key in ("loss", "loss_in_long_windows"):
        losses = [run[key] for run in runs]
        found[key] = statistics.mean(losses)
        found[f"{key}_standard_deviation"] = statistics.stdev(losses) if len(losses) > 1 else None
    found["perplexity_over_teachers"] = perplexity(found["loss"] - teacher["loss"])
    return found


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| model | loss | perplexity over the teacher's | loss in long windows | cache at 32,768 tokens, KiB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    rows = {"teacher": figures["teacher"] | {"perplexity_over_teachers": 1.0}} | figures["students"]
    for name, found in rows.items():
        spread = found.get("loss_standard_deviation")
        cells = [
            f"{found['loss']:.3f}" + (f" ± {spread:.3f}" if spread is not None else ""),
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
        spread = [found.get(f"{key}_standard_deviation") or 0.0 for found in models.values()]
        axes.errorbar(losses, list(models), xerr=spread, capsize=3, label=label, **style(number, linestyle=""))
    axes.set(xlabel="held-out loss (nats per token)", ylabel="layers with attention")
    axes.set_title(SPREAD, loc="left", fontsize=9)
    return figure


if __name__ == "__main__":
    start("upcycling_gaps.py", gaps, GapArguments)
