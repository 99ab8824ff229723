"""Does a state drift? A million tokens read one by one in float32, beside the same model in float64, logits at marks.

    python benchmarks/long_decoding.py            # hours on one core; goes on after the variants that it has done

The float64 model reads the same tokens in pieces of 1,000. Models are tiny and random: what is measured is arithmetic.
"""

import argparse
import copy
import json
import time

import torch
from timing import machine_arguments, write_results
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hf_hybrid_ssm  # noqa: F401 - registers the families
from benchmarks.streaming import FAMILIES, SIZES, resident_megabytes
from benchmarks.table_text import RESULTS

MARKS = (100, 1_000, 10_000, 100_000, 1_000_000)
PIECE = 1000
WINDOWS = {"layer_types": ["longhorn", "window_attention"], "sliding_window": 64, "num_attention_heads": 4}
VARIANTS = {
    "Longhorn": ("longhorn", {}),
    "Longhorn, a window in layer 1": ("longhorn", WINDOWS),
    "SPADE, frozen S4": ("spade", {}),
    "SPADE, S5": ("spade", {"ssm_type": "s5", "ssm_state_size": 16}),
    "BST SH": ("bst", {}),
    "BST MF": ("bst", {"context_variant": "mf"}),
    "LMU-ISA": ("lmu_isa", {}),
    "LMU-ISA, window attention": ("lmu_isa", {"first_sublayer": "window_attention", "sliding_window": 64}),
}


@torch.inference_mode()
def drift(model: torch.nn.Module, tokens: torch.Tensor, marks: tuple[int, ...]) -> dict:
    """Mark → the largest difference of logits over the largest logit; resident memory at each."""
    exact = copy.deepcopy(model).double()
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    errors, megabytes, begin, read = {}, {}, time.perf_counter(), 0
    for mark in marks:
        piece = tokens[:, read:mark]
        for ids in piece.split(1, dim=1):
            found = model(ids, cache=caches[0]).logits[0, -1]
        for ids in piece.split(PIECE, dim=1):
            wanted = exact(ids, cache=caches[1], logits_to_keep=1).logits[0, -1]
        errors[mark] = float((found.double() - wanted).abs().max() / wanted.abs().max())
        megabytes[mark] = round(resident_megabytes(), 1)
        read = mark
        print(f"  {mark:,} tokens: {errors[mark]:.1e}, {time.perf_counter() - begin:.0f} s", flush=True)
    return {"errors": errors, "megabytes": megabytes, "seconds": round(time.perf_counter() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=MARKS[-1], help="the last mark")
    parser.add_argument("--quick", action="store_true", help="1,000 tokens, and nothing is written")
    arguments = machine_arguments(parser)
    torch.set_num_threads(1)
    marks = tuple(mark for mark in MARKS if mark <= (1000 if arguments.quick else arguments.tokens))
    file = RESULTS / "long_decoding.json"
    done = {} if arguments.quick or not file.is_file() else json.loads(file.read_text(encoding="utf-8"))["models"]
    for name, (family, fields) in VARIANTS.items():
        if name in done and str(marks[-1]) in done[name]["errors"]:
            continue
        print(name, flush=True)
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **fields})
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.requires_grad:
                parameter.data.mul_(1.5)  # away from the smooth initial point
        tokens = torch.randint(0, SIZES["vocab_size"], (1, marks[-1]), generator=torch.Generator().manual_seed(1))
        done[name] = drift(model, tokens, marks)
        if not arguments.quick:
            write_results("long_decoding", {"settings": {**SIZES, "window": 64}, "models": done})
            done = json.loads(file.read_text(encoding="utf-8"))["models"]


if __name__ == "__main__":
    main()
