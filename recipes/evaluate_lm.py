"""Evaluate a causal language model: perplexity, samples.

Perplexity is that of a sliding window, and that at 1 to 32 times a length.

    python recipes/evaluate_lm.py --model runs/longhorn-books --files text.jsonl --length 512

Documents are scored as pretrain_clm.py trains them: each alone, its first token given the beginning-of-text token (the
end-of-text token, if the tokenizer has no other), and the end-of-text token last. For growing windows the text is rows
of one document each, the same for every window; windows longer than every document are left out. Writes
evaluation.json and extrapolation.png to `--output_dir` (the model's folder by default).
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from _lib.checks import check_checkpoint, check_texts, check_vocabulary
from _lib.documents import begin_of, documents_of_files, token_ids
from _lib.entry import guarded, parsed
from _lib.plotting import perplexity_by_length
from _lib.scoring import loss_at, scored_documents, sliding_loss
from _lib.training import perplexity, save_figure, write_json

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.hub.whole_models import load_whole

FIGURES, PICTURE = "evaluation.json", "extrapolation.png"


@dataclass
class EvaluationArguments:
    model: str = field(metadata={"help": "folder or Hub name"})
    files: list[str] = field(metadata={"help": "held-out text: txt, jsonl or parquet"})
    text_column: str = "text"
    length: int = field(default=1024, metadata={"help": "the training length, in tokens"})
    stride: int | None = field(default=None, metadata={"help": "step of the sliding window; half of `length`"})
    factors: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32], metadata={"help": "multiples of length"})
    max_tokens: int = field(default=200_000, metadata={"help": "of the text, from its start"})
    prompts: list[str] = field(default_factory=list, metadata={"help": "texts to continue; the text's start if none"})
    new_tokens: int = 64
    seed: int = 0
    output_dir: str | None = None

    def __post_init__(self):
        self.stride = self.length // 2 if self.stride is None else self.stride
        self.output_dir = self.output_dir or self.model
        if not 1 <= self.stride < self.length:
            raise ValueError(f"stride={self.stride} must lie between 1 and length={self.length} - 1.")
        self.factors = sorted(set(self.factors))
        if not self.factors or self.factors[0] < 1 or any(b % a for a, b in pairwise(self.factors)):
            raise ValueError(f"factors={self.factors} must be at least 1, and each divide the next larger one.")


def extrapolation(
    model: PreTrainedModel, documents: list[torch.Tensor], length: int, factors: list[int]
) -> list[dict[str, Any]]:
    """The loss at multiples of a length, all on the same tokens; what is longer than every document is left out."""
    lengths = [factor * length for factor in factors if factor * length <= max(map(len, documents))]
    if not lengths:
        return []
    rows = torch.cat([document[: len(document) // lengths[-1] * lengths[-1]] for document in documents])
    rows = rows.view(-1, lengths[-1])
    curve = []
    for each in tqdm(lengths, desc="lengths"):
        loss = loss_at(model, rows, each, length)
        scored = len(rows) * (lengths[-1] // length) * (length - 1)
        curve.append({"length": each, "loss": loss, "perplexity": perplexity(loss), "scored_tokens": scored})
    return curve


def samples(model: PreTrainedModel, tokenizer: Any, prompts: list[str], new_tokens: int) -> list[dict[str, str]]:
    """What the model generates after each prompt, which is read as the beginning of a document."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([[begin_of(tokenizer), *token_ids([prompt], tokenizer)[0]]], device=model.device)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=True, top_p=0.9
        )
        answers.append({"prompt": prompt, "continuation": tokenizer.decode(output[0, ids.shape[1] :])})
    return answers


def evaluate(arguments: EvaluationArguments) -> dict[str, Any]:
    """All figures, as they are written to evaluation.json.

    Raises:
        FileExistsError: there is a picture of the same name that no evaluation drew.
    """
    folder = Path(arguments.output_dir or arguments.model)
    if (folder / PICTURE).exists() and not (folder / FIGURES).exists():
        raise FileExistsError(f"{folder / PICTURE} is not of an evaluation: give another --output_dir.")
    set_seed(arguments.seed)
    documents = documents_of_files(arguments.files)
    check_texts(documents, [arguments.text_column], "text_column")
    check_checkpoint(arguments.model, "model", AutoModelForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = load_whole(AutoModelForCausalLM, arguments.model).eval()
    check_vocabulary(model, tokenizer)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    texts = list(documents[arguments.text_column])
    scored, num_bytes = scored_documents(texts, tokenizer, arguments.max_tokens)
    tokens = sum(len(document) - 1 for document in scored)
    loss = sliding_loss(model, scored, arguments.length, int(arguments.stride or 1))
    figures: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "documents": len(scored),
        "tokens": tokens,
        "sliding": {
            "length": arguments.length,
            "stride": arguments.stride,
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": loss * tokens / num_bytes / math.log(2),
        },
        "extrapolation": extrapolation(model, scored, arguments.length, arguments.factors),
        "samples": samples(model, tokenizer, arguments.prompts or [texts[0][:200]], arguments.new_tokens),
    }
    write_json(folder / FIGURES, figures)
    if figures["extrapolation"]:
        question = "Does perplexity stay low in longer windows?"
        figure = perplexity_by_length(question, {figures["model"]: figures["extrapolation"]}, None)
        save_figure(figure, folder / PICTURE)
    return figures


def table_of(figures: dict[str, Any]) -> str:
    """What a person reads at the end; evaluation.json has every digit."""
    sliding = figures["sliding"]
    rows = [("window", "perplexity", "loss", "tokens scored")]
    window = f"{sliding['length']:,} (sliding by {sliding['stride']:,})"
    rows.append((window, f"{sliding['perplexity']:.2f}", f"{sliding['loss']:.4f}", f"{figures['tokens']:,}"))
    for point in figures["extrapolation"]:
        figured = f"{point['perplexity']:.2f}", f"{point['loss']:.4f}", f"{point['scored_tokens']:,}"
        rows.append((f"{point['length']:,}", *figured))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    title = f"{figures['model']}: {figures['documents']:,} documents, {sliding['bits_per_byte']:.4f} bits per byte"
    texts = [f"{sample['prompt']!r} →\n{sample['continuation']!r}" for sample in figures["samples"]]
    return "\n".join([title, "", *lines, "", *texts])


if __name__ == "__main__":
    guarded(
        "evaluate_lm.py",
        lambda: print(table_of(evaluate(parsed(EvaluationArguments)))),
    )
