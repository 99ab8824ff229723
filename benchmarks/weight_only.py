"""What do weights of 16, 8 and 4 bits save when decoding, which is bound by the bytes of the weights, and what do they
lose?

    python benchmarks/weight_only.py --text TEXT.jsonl --models FOLDER...

Time: one row, width 1024, 24 layers (Longhorn 48), a vocabulary of 32,000, random weights; 8 and 4 bits are
`LowBitConfig` over bfloat16. Loss: of the language models in the folders named, on the beginnings of the texts.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from timing import machine_arguments, paired_seconds, write_results
from timing.models import FAMILIES, build, decoder
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_hybrid_ssm

VOCABULARY = 32000
STEPS = 4
FORMS: dict[str, tuple[torch.dtype, int | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "8 bits": (torch.bfloat16, 8),
    "4 bits": (torch.bfloat16, 4),
}
ROWS, LENGTH = 16, 1024  # of the text that the loss is taken on


def load(folder: str | Path, form: str) -> PreTrainedModel:
    dtype, bits = FORMS[form]
    low_bits = {} if bits is None else {"quantization_config": hf_hybrid_ssm.LowBitConfig(bits=bits)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **low_bits).eval()


def milliseconds(name: str, width: int, depth: int, rounds: int) -> dict:
    """Of a token in every form, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        build(name, width, depth, vocabulary=VOCABULARY).save_pretrained(folder)
        steps: dict[str, Callable] = {form: decoder(load(folder, form), STEPS) for form in FORMS}
    seconds = paired_seconds(steps, rounds=rounds, warm_up=1, device="cpu")
    del steps
    gc.collect()
    found = {form: round(1000 * value / STEPS, 2) for form, value in seconds.items()}
    print(f"{name}: {found} ms a token", flush=True)
    return found


@torch.inference_mode()
def losses(folder: str, text: Path, forms: Iterable[str] = FORMS, load: Callable = load) -> dict:
    """Nats per token in every form, each row read from its beginning."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    for line in text.read_text(encoding="utf-8").splitlines():
        ids += tokenizer(json.loads(line)["text"])["input_ids"]
        if len(ids) >= ROWS * LENGTH:
            break
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH][: ROWS * LENGTH]).view(-1, 1, LENGTH)
    if not len(rows):
        raise ValueError(f"{text} must have at least {LENGTH} tokens, got {len(ids)}.")
    found = {}
    for form in forms:
        model = load(folder, form)
        found[form] = sum(float(model(row, labels=row).loss.float()) for row in rows) / len(rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    names = ("Llama", *FAMILIES)
    parser.add_argument("--families", nargs="+", choices=names, default=list(names), metavar="FAMILY")
    parser.add_argument("--models", nargs="+", default=[], metavar="FOLDER", help="whose loss is taken")
    parser.add_argument("--text", type=Path, help="JSON lines with a field `text`, for the loss")
    arguments = machine_arguments(parser)
    if arguments.device != "cpu":
        parser.error("--device cuda: this benchmark is about CPUs.")
    if bool(arguments.models) != (arguments.text is not None):
        parser.error("--models and --text go together.")
    width, depth, rounds = (128, 2, 2) if arguments.quick else (1024, 24, 5)
    figures = {
        "shape": {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": VOCABULARY},
        "milliseconds_per_token": {name: milliseconds(name, width, depth, rounds) for name in arguments.families},
        "loss": {Path(folder).name: losses(folder, arguments.text) for folder in arguments.models},
    }
    write_results("weight_only", figures, arguments.device)


if __name__ == "__main__":
    main()
