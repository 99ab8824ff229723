"""Evaluate a causal language model: sliding perplexity, perplexity at 1x to 32x of a length, samples.

    python recipes/evaluate_lm.py --model runs/longhorn-books --files text.jsonl --length 512

Writes evaluation.json and extrapolation.png to `--output_dir` (the model's folder by default).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from checks import check_checkpoint, check_columns, check_vocabulary
from documents import documents_of_files
from tqdm import tqdm
from training import perplexity, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, set_seed

import hf_hybrid_ssm  # noqa: F401 - registers the families


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
        if not self.factors or min(self.factors) < 1:
            raise ValueError(f"factors={self.factors} must be positive.")


@torch.inference_mode()
def token_losses(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """-log p of tokens 1 ... L-1 given all before, (L - 1,) float32 nats; `tokens` is (L,)."""
    logits = model(tokens.unsqueeze(0).to(model.device), use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), tokens[1:].to(logits.device), reduction="none").cpu()


def windows(tokens: torch.Tensor, length: int, stride: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Overlapping pieces, and how many of the last tokens of each were in none before."""
    done = 1  # the first token has nothing before it
    for start in range(0, len(tokens), stride):
        piece = tokens[start : start + length]
        new = start + len(piece) - done
        if new > 0:
            yield piece, new
            done += new


def sliding_loss(model: PreTrainedModel, tokens: torch.Tensor, length: int, stride: int) -> float:
    """Mean loss of all tokens, each with at least `length - stride` tokens before it (where the text has them)."""
    total, count = 0.0, 0
    pieces = list(windows(tokens, length, stride))
    for piece, new in tqdm(pieces, desc="sliding window"):
        total += token_losses(model, piece)[-new:].sum().item()
        count += new
    return total / count


def loss_at_length(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> float:
    """Mean loss over pieces of `length` tokens that start with an empty memory."""
    pieces = [piece for piece in tokens.split(length) if len(piece) == length]
    losses = [token_losses(model, piece) for piece in tqdm(pieces, desc=f"length {length}")]
    return torch.cat(losses).mean().item()


def extrapolation(model: PreTrainedModel, tokens: torch.Tensor, length: int, factors: list[int]) -> list[dict]:
    """The loss at multiples of a length, all on the same tokens; longer than the text is left out."""
    fitting = [factor for factor in factors if factor * length <= len(tokens)]
    if not fitting:
        raise ValueError(f"the text has {len(tokens)} tokens, less than length={length}.")
    common = len(tokens) // (math.lcm(*fitting) * length) * math.lcm(*fitting) * length
    curve = []
    for factor in fitting:
        loss = loss_at_length(model, tokens[:common] if common else tokens, factor * length)
        curve.append({"length": factor * length, "loss": loss, "perplexity": perplexity(loss)})
    return curve


def samples(model: PreTrainedModel, tokenizer: Any, prompts: list[str], new_tokens: int) -> list[dict[str, str]]:
    answers = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=True, top_p=0.9)
        answers.append({"prompt": prompt, "continuation": tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])})
    return answers


def plot_extrapolation(curve: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    axes.plot([point["length"] for point in curve], [point["perplexity"] for point in curve], marker="o")
    axes.set(xlabel="tokens at a time", ylabel="perplexity", xscale="log")
    axes.set_xticks([point["length"] for point in curve], [str(point["length"]) for point in curve])
    figure.savefig(path, dpi=150)


def evaluate(arguments: EvaluationArguments) -> dict[str, Any]:
    """All figures, as they are written to evaluation.json."""
    set_seed(arguments.seed)
    documents = documents_of_files(arguments.files)
    check_columns(documents, [arguments.text_column], "text_column")
    check_checkpoint(arguments.model, "model", AutoModelForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    check_vocabulary(model, tokenizer)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    texts = list(documents[arguments.text_column])
    text = tokenizer.eos_token.join(texts)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = torch.tensor(encoded["input_ids"][: arguments.max_tokens])
    num_bytes = len(text[: encoded["offset_mapping"][len(tokens) - 1][1]].encode())
    loss = sliding_loss(model, tokens, arguments.length, int(arguments.stride or 1))
    figures: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "tokens": len(tokens),
        "sliding": {
            "length": arguments.length,
            "stride": arguments.stride,
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": loss * (len(tokens) - 1) / num_bytes / math.log(2),
        },
        "extrapolation": extrapolation(model, tokens, arguments.length, arguments.factors),
        "samples": samples(model, tokenizer, arguments.prompts or [text[:200]], arguments.new_tokens),
    }
    folder = Path(arguments.output_dir or arguments.model)
    write_json(folder / "evaluation.json", figures)
    plot_extrapolation(figures["extrapolation"], folder / "extrapolation.png")
    return figures


if __name__ == "__main__":
    print(evaluate(HfArgumentParser(EvaluationArguments).parse_args_into_dataclasses()[0]))
