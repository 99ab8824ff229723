"""What recipes add to transformers' Trainer: AdamW groups, and a run's figures as JSON and a plot."""

import atexit
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from _lib.checks import is_first_process
from _lib.entry import training_begins
from _lib.plotting import loss_by_step, write_png
from _lib.provenance import provenance, to_json

import numpy as np
import torch
import transformers
from datasets import Dataset
from matplotlib.figure import Figure
from transformers import AutoConfig, PreTrainedModel

from hf_hybrid_ssm.hub.tables import markdown
from hf_hybrid_ssm.hub.writing import write_whole
from hf_hybrid_ssm.training.memory import keep_freed_memory
from hf_hybrid_ssm.training.optim import MuonAdamW, parameter_groups
from hf_hybrid_ssm.training.resume import checkpoint_defect, latest_complete_checkpoint

# Of weights that are trained, whatever a checkpoint stores them in: Adam's steps are below bfloat16's last digit.
# (bf16=true computes in bfloat16 beside float32 weights.)
TRAINING_DTYPE = torch.float32
SHOWN = 9  # entries of a list in a table


@atexit.register
def _leave_process_group() -> None:
    """Gloo's threads must end before the interpreter does: a process that still holds them may abort at its exit."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Trainer(transformers.Trainer):
    """`transformers.Trainer` that decays only matrices and respects the optimizer options of parameters, with AdamW or
    what `optim` names, and with Muon if `muon` is set."""

    muon = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.device.type == "cpu":
            self.args.dataloader_pin_memory = False  # there is nothing to pin for, and torch would warn of it
            keep_freed_memory()
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and self.args.device.type == "cpu":
            say("FSDP was asked for; on CPUs accelerate makes DDP of it: every process holds all parameters.")

    def train(self, *args: Any, **kwargs: Any):
        training_begins()
        return super().train(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Schedule-free optimizers train other weights than they evaluate: those that are evaluated are saved."""
        if callable(switch := getattr(self.optimizer, "eval", None)):  # the next step of training switches back
            switch()
        super().save_model(*args, **kwargs)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:  # type: ignore[has-type]
            model = self.model if model is None else model
            rate, decay = self.args.learning_rate, self.args.weight_decay
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            if self.muon:
                if self.is_deepspeed_enabled:
                    raise ValueError("muon=true takes whole matrices, which DeepSpeed does not keep: leave one out.")
                betas = (self.args.adam_beta1, self.args.adam_beta2)
                self.optimizer = MuonAdamW(model, rate, decay, betas=betas, eps=self.args.adam_epsilon)
            else:
                self.optimizer = optimizer_class(parameter_groups(model, decay, lr=rate), **options)
        return self.optimizer

    def predictions(self, rows: Dataset) -> np.ndarray:
        """The model's prediction for each row, in the order of the rows.

        Rows are not grouped by length, even if training groups them, and those that several processes repeat to fill
        their last batch are left out.
        """
        self.args.train_sampling_strategy = "sequential"
        found = self.predict(rows).predictions
        return (found[0] if isinstance(found, tuple) else found)[: len(rows)]


class LanguageTrainer(Trainer):
    """`Trainer` whose evaluation loss is the mean over all targets, in any number of processes.

    transformers averages the batches' means, so that a small last batch counts as much as a full one, and rows that
    several processes repeat to fill it count twice. Every label other than -100 must be a target.
    """

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any):
        self._scored = [0.0, 0.0]
        averaged, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        self.args.average_tokens_across_devices = averaged
        scored = torch.tensor(self._scored, dtype=torch.float64, device=self.args.device)
        total, targets = self.accelerator.reduce(scored, "sum").tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = total / targets
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        labels, state = inputs["labels"].clone(), self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:  # rows beyond it are repeated
            labels[max(state.remainder - self.args.process_index * len(labels), 0) :] = -100
        found = super().prediction_step(model, inputs | {"labels": labels}, prediction_loss_only, ignore_keys)
        if targets := int((labels != -100).sum()):
            self._scored = [self._scored[0] + float(found[0]) * targets, self._scored[1] + targets]
        return found


def load_to_train(auto_class: Any, checkpoint: str, new_weights: bool = False, **config: Any) -> PreTrainedModel:
    """A checkpoint's model with weights that can be trained; `new_weights` takes only its configuration."""
    if new_weights:
        new = AutoConfig.from_pretrained(checkpoint, dtype=TRAINING_DTYPE, trust_remote_code=False, **config)
        return auto_class.from_config(new)
    return auto_class.from_pretrained(checkpoint, dtype=TRAINING_DTYPE, **config)


def checkpoint_to_resume(resume: str | None, output_dir: str) -> str | None:
    """The folder to resume from: `resume` itself, or with "auto" the newest complete one in `output_dir`, if any."""
    if resume == "auto":
        return latest_complete_checkpoint(output_dir)
    if resume is not None and (reason := checkpoint_defect(resume)):
        raise ValueError(f"resume={resume!r} is not a checkpoint to resume from: {reason}.")
    return resume


def write_text(path: str | Path, text: str) -> None:
    """The whole file or, if the process is killed, none of it. Of several processes, only the first writes."""
    if is_first_process():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def write_json(path: str | Path, content: Any) -> None:
    write_text(path, to_json(content))


def write_results(path: str | Path, figures: dict[str, Any]) -> None:
    """Figures that are shown elsewhere, with what they depend on."""
    write_json(path, provenance() | figures)


def write_lines(path: str | Path, rows: Iterable[Any]) -> None:
    """JSON, one per line."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def save_figure(figure: Figure, path: str | Path) -> None:
    """As `write_text` does."""
    if is_first_process():
        write_png(figure, path)


def say(text: Any) -> None:
    """Print, once for all processes."""
    if is_first_process():
        print(text)


def say_figures(figures: Mapping[str, Any]) -> None:
    """A table of a run's figures, once for all processes; a longer list is in results.json alone."""
    say(markdown("Results", ["figure", "value"], list(_rows(figures))))


def _rows(figures: Mapping[str, Any], names: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _rows(value, (*names, name))
        elif not isinstance(value, list) or len(value) < SHOWN:
            shown = ", ".join(map(_shown, value)) if isinstance(value, list) else _shown(value)
            yield [" ".join((*names, name)).replace("_", " "), shown]


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_figures(figures: dict[str, Any], output_dir: str | Path, results: str | Path | None) -> None:
    """results.json in `output_dir`, and the same with its provenance in the file `results` where one is named."""
    write_json(Path(output_dir) / "results.json", figures)
    if results is not None:
        write_results(results, figures)


def write_with_picture(
    figures: dict[str, Any], draw: Callable[[], Figure] | None, path: Path, results: str | Path | None
) -> None:
    """Figures with their provenance as JSON, and drawn as PNG: at `path` and at `results`, if one is named; the
    endings of both are those of the files."""
    for target in (path, *([Path(results)] if results else [])):
        write_results(target.with_suffix(".json"), figures)
        if draw is not None:
            save_figure(draw(), target.with_suffix(".png"))


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else float("inf")


def plot_loss(history: list[dict[str, float]], path: str | Path, levels: dict[str, float] | None = None) -> None:
    """Training and validation loss by step; `levels` are drawn as horizontal lines."""
    save_figure(loss_by_step(history, levels), path)
