"""Measure the loss by position in a row.

Does more context keep helping a model, or does its loss flatten?

    python recipes/per_token_loss.py recipes/configs/lmu_isa/per_token_cpu.yaml [key=value ...]

Reads trained causal language models and held-out text, averages the loss at each position over rows of one document
each, smooths in logarithmic bins, and finds the position after which it falls by less than 0.01 nat per doubling.
Writes per_token_loss.json and .png to `output_dir`, and both to `results` (a path without extension).
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib.checks import check_least, check_models, check_output, check_texts, check_vocabulary
from _lib.documents import documents_of_files
from _lib.entry import start
from _lib.plotting import measured_at, panels, style
from _lib.scoring import rows_within
from _lib.training import say, write_with_picture

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.hub.whole_models import load_whole

FLAT = 0.01  # nats per doubling


@dataclass
class PerTokenArguments:
    """Which models to score on which text."""

    models: dict[str, list[str]] = field(metadata={"help": "name: checkpoints (such as seeds) to average over"})
    files: list[str] = field(metadata={"help": "held-out text: txt, jsonl or parquet"})
    sequence_length: int = 1024
    rows: int = field(default=1000, metadata={"help": "at most this many rows"})
    batch_size: int = 8
    text_column: str = "text"
    output_dir: str = "runs/per-token-loss"
    results: str | None = field(default=None, metadata={"help": "another path, without extension, for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        check_least(self, 16, "sequence_length")
        check_models(self.models)


def rows_of(arguments: PerTokenArguments, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Rows from inside one document each, (N, L): a position is the number of tokens the model has seen."""
    documents = documents_of_files(arguments.files)
    check_texts(documents, [arguments.text_column], "text_column")
    rows = list(rows_within(documents[arguments.text_column], tokenizer, arguments.sequence_length))
    if not rows:
        raise ValueError(f"sequence_length={arguments.sequence_length}: no document of {arguments.files} is so long.")
    return torch.tensor(rows[: arguments.rows])


@torch.inference_mode()
def losses_by_position(model: PreTrainedModel, rows: torch.Tensor, batch_size: int) -> np.ndarray:
    """Mean loss of the token at positions 1 … L - 1, (L - 1,)."""
    total = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)
    for part in rows.split(batch_size):
        logits = model(part, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none")
        total += loss.double().sum(0)
    return (total / len(rows)).numpy()


def binned(losses: np.ndarray, bins_a_doubling: int = 2) -> dict[str, list[float]]:
    """Means over bins of equal width in log position; `positions` are the bins' geometric centres."""
    positions = np.arange(1, len(losses) + 1)
    edges = np.floor(np.log2(positions) * bins_a_doubling).astype(int)
    centres, means = [], []
    for edge in np.unique(edges):
        inside = edges == edge
        centres.append(float(np.exp(np.log(positions[inside]).mean())))
        means.append(float(losses[inside].mean()))
    return {"positions": centres, "loss": means}


def flat_from(curve: dict[str, list[float]], doublings: int = 2, bins_a_doubling: int = 2) -> float | None:
    """The first position after which the loss falls by less than FLAT per doubling, to the end; None if there is none.

    Slopes are taken over `doublings` doublings, since single bins are noisy.
    """
    step = doublings * bins_a_doubling
    positions, loss = curve["positions"], curve["loss"]
    if len(loss) <= step:
        return None
    flat = None
    for i in range(len(loss) - step - 1, -1, -1):
        slope = (loss[i + step] - loss[i]) / np.log2(positions[i + step] / positions[i])
        if slope < -FLAT:
            break
        flat = positions[i]
    return flat


def per_token_loss(arguments: PerTokenArguments) -> dict[str, Any]:
    check_output(arguments.output_dir, arguments.overwrite)
    figures: dict[str, Any] = {"sequence_length": arguments.sequence_length, "models": {}}
    for name, checkpoints in arguments.models.items():
        curves = []
        for checkpoint in checkpoints:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint)
            model = load_whole(AutoModelForCausalLM, checkpoint).eval()
            check_vocabulary(model, tokenizer)
            rows = rows_of(arguments, tokenizer)
            curves.append(losses_by_position(model, rows, arguments.batch_size))
        mean = np.mean(curves, 0)
        curve = binned(mean)
        last = mean[len(mean) // 2 :]
        figures["models"][name] = {
            **curve,
            "rows": len(rows),
            "checkpoints": len(checkpoints),
            "mean_loss": float(mean.mean()),
            "mean_loss_of_the_last_half": float(last.mean()),
            "flat_from_position": flat_from(curve),
        }
    picture = partial(draw, figures["models"])
    write_with_picture(figures, picture, Path(arguments.output_dir) / "per_token_loss", arguments.results)
    for name, found in figures["models"].items():
        say(f"{name}: loss {found['mean_loss']:.3f}, flat from position {found['flat_from_position']}")
    return figures


def draw(models: dict[str, Any]) -> Figure:
    figure, (axes,) = panels("Does a model go on learning from what it has read?")
    for number, (name, found) in enumerate(models.items()):
        axes.plot(found["positions"], found["loss"], label=name, **style(number))
    last = max(found["positions"][-1] for found in models.values())
    measured_at(axes, [2**power for power in range(int(np.log2(last)) + 1)])
    axes.set(xlabel="position in the row (tokens)", ylabel="loss (nats per token)")
    return figure


if __name__ == "__main__":
    start("per_token_loss.py", per_token_loss, PerTokenArguments)
