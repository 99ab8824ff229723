"""How many Python functions one decoded token calls, by model: what the host does, whatever the processor.

    python -m benchmarks.host_calls              with C's steps
    python -m benchmarks.host_calls --triton     with Triton's, on a driver without a card: nothing runs
    python -m benchmarks.host_calls --functions 20    also the functions that are called most

Two versions of transformers, torch or Python give other counts; calls into C are not counted.
"""

import argparse
import sys
from collections import Counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hybrid_ssm import BstConfig, BstForCausalLM, LonghornConfig, LonghornForCausalLM
from hf_hybrid_ssm.models.outputs import CACHE

LAYERS = 24
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": LAYERS}
ATTENTION = SIZES | {"intermediate_size": 64, "num_attention_heads": 4}


def models() -> dict[str, Any]:
    return {
        "Llama": LlamaForCausalLM(LlamaConfig(**ATTENTION)),
        "Longhorn": LonghornForCausalLM(LonghornConfig(**SIZES)),
        "BST": BstForCausalLM(BstConfig(**ATTENTION)),
    }


@torch.inference_mode()
def calls_of(model: Any) -> Counter[str]:
    """Of a token after some others: how often each function is called, by file and name."""
    token = torch.zeros(1, 1, dtype=torch.long)
    cache = model.eval()(token.expand(1, 4), use_cache=True)[CACHE]
    options = {CACHE: cache, "use_cache": True}
    for _ in range(3):  # the first ones learn what later ones remember
        model(token, **options)
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found[f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])} {frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        model(token, **options)
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", action="store_true", help="let Triton's steps be launched")
    parser.add_argument("--functions", type=int, default=0, help="show so many functions of each model")
    options = parser.parse_args()
    if options.triton:
        from benchmarks import absent_card

        absent_card.install(90, compiles=False)
    for name, model in models().items():
        if options.triton and name == "BST":
            continue  # its window attention on CUDA is torch's FlexAttention
        found = calls_of(model)
        print(f"{name}: {found.total():,} calls a token, {found.total() / LAYERS:.0f} a layer")
        for function, count in found.most_common(options.functions):
            print(f"  {count:5} {function}")


if __name__ == "__main__":
    main()
