"""Reading text without end: plain forwards with a cache, in constant memory, for as long as one likes.

    python benchmarks/streaming.py --tokens 1000000 --model runs/longhorn-books --text books.jsonl

Besides, tiny models of all families with random weights read a fifth as many random tokens, which shows memory and
stability but says nothing of the loss. Writes benchmarks/results/streaming.json.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

import hf_hybrid_ssm  # noqa: F401 - registers the families
from benchmarks.rounds import resident_bytes
from benchmarks.timing import write_results

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 0}
FAMILIES = {
    "longhorn": {},
    "spade": {"num_attention_heads": 4, "intermediate_size": 128, "sliding_window": 64},
    "bst": {"num_attention_heads": 4, "head_dim": 16, "intermediate_size": 128, "sliding_window": 64}
    | {"ssm_layers": [1], "initializer_range": 0.1},
    "lmu_isa": {"lmu_order": 32, "lmu_theta": 64.0, "post_intermediate_size": 128, "num_attention_heads": 4},
}


def stream(model: PreTrainedModel, tokens: torch.Tensor, piece: int) -> Iterator[tuple[float, float]]:
    """Mean loss of each piece and resident memory after it; nothing is kept but the cache."""
    cache = DynamicCache(config=model.config)
    last = None
    with torch.inference_mode():
        for ids in tokens.split(piece):
            logits = model(ids.unsqueeze(0), cache=cache, use_cache=True).logits[0]
            before = logits if last is None else torch.cat([last, logits])
            targets = ids[1:] if last is None else ids
            loss = F.cross_entropy(before[:-1].float(), targets).item()
            last = logits[-1:].clone()
            yield loss, resident_bytes() / 2**20


def read(model: PreTrainedModel, tokens: torch.Tensor, piece: int, report_every: int) -> dict:
    """The curves, averaged over stretches of `report_every` tokens."""
    gc.collect()
    report_every = min(report_every, max(piece, len(tokens) // 10))
    losses, memory = zip(*stream(model.eval(), tokens, piece))
    size = max(1, report_every // piece)
    stretches = [slice(start, start + size) for start in range(0, len(losses), size)]
    mean_losses = [sum(losses[s]) / len(losses[s]) for s in stretches]
    peaks = [max(memory[s]) for s in stretches]
    settled = peaks[1:] if len(peaks) > 2 else peaks  # the allocator fills its pools during the first stretch
    slope = (settled[-1] - settled[0]) / max(1, len(settled) - 1) * 100_000 / report_every
    return {
        "tokens": len(tokens),
        "finite": all(loss == loss and abs(loss) != float("inf") for loss in losses),
        "megabytes_per_100k_tokens": round(slope, 3),
        "loss_by_stretch": [round(loss, 4) for loss in mean_losses],
        "resident_megabytes_by_stretch": [round(value, 1) for value in peaks],
    }


def text_tokens(folder: str, path: str, count: int) -> torch.Tensor:
    """`count` tokens of the documents of a JSONL file, from its start again if it is too short."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in Path(path).read_text(encoding="utf-8").splitlines()]
    ids = tokenizer(tokenizer.eos_token.join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor((ids * (count // len(ids) + 1))[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--piece", type=int, default=1000, help="tokens of one forward")
    parser.add_argument("--model", nargs="*", default=[], help="trained checkpoints, which read --text")
    parser.add_argument("--text", help="a JSONL file with the column text")
    parser.add_argument("--quick", action="store_true", help="50,000 tokens")
    arguments = parser.parse_args()
    count = 50_000 if arguments.quick else arguments.tokens
    every = max(count // 20, arguments.piece)
    figures = {}
    for folder in arguments.model:
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokens = text_tokens(folder, arguments.text, count)
        figures[f"{model.config.model_type}, trained, on text"] = read(model, tokens, arguments.piece, every)
    for name, fields in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **fields))
        figures[f"{name}, random"] = read(model, torch.randint(0, 256, (count // 5,)), arguments.piece, every)
    write_results("streaming", {"stretch": every, "models": figures})


if __name__ == "__main__":
    main()
