"""What does a prompt in bfloat16 take where the processor has no instructions for bfloat16, and what do products in
float32 (`use_float32_products`) change?

Time and memory of a prompt of 1,024 tokens in bfloat16, with its products in float32, and wholly in float32, in turns;
and how far the logits of both are from those of the same weights in float64. Width 576, 15 layers (Longhorn 30), a
vocabulary of 32,000, random weights. torch and oneDNN are kept to AVX2, so that a newer processor does it too.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from timing import machine_arguments, paired_seconds, peak_megabytes_of, write_results
from timing.models import build, random_rows
from transformers import PreTrainedModel

from hf_hybrid_ssm import use_float32_products

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}  # read when torch is loaded
VOCABULARY = 32000
NAMES = ("Llama", "Longhorn", "SPADE", "BST SH", "LMU-ISA")
FORMS = ("bfloat16", "products in float32", "float32")


def forms_of(name: str, width: int, depth: int) -> dict[str, PreTrainedModel]:
    """The same weights, which are numbers of bfloat16, in every form."""
    found = {}
    for form in FORMS:
        model = build(name, width, depth, vocabulary=VOCABULARY).bfloat16()
        if form == "products in float32" and not use_float32_products(model):
            sys.exit("this processor is said to have instructions for bfloat16.")
        found[form] = model.float() if form == "float32" else model
    return found


def measure(name: str, width: int, depth: int, length: int, rounds: int) -> dict:
    ids = random_rows(1, length, VOCABULARY)
    models = forms_of(name, width, depth)

    def reading(model: PreTrainedModel) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with torch.inference_mode():
                return model(ids, use_cache=True, logits_to_keep=1).logits

        return run

    runs = {form: reading(model) for form, model in models.items()}
    seconds = paired_seconds(runs, rounds=rounds, warm_up=1)
    memory = {form: round(peak_megabytes_of(run)) for form, run in runs.items()}
    logits = {form: run().double() for form, run in runs.items()}
    exact = reading(build(name, width, depth, vocabulary=VOCABULARY).bfloat16().double())()
    errors = {form: float((logits[form] - exact).norm() / exact.norm()) for form in FORMS}
    found = {
        form: {"seconds": round(seconds[form], 3), "megabytes": memory[form], "error": float(f"{errors[form]:.2g}")}
        for form in FORMS
    }
    print(f"{name}: {found}", flush=True)
    return found


def main() -> None:
    if any(os.environ.get(name) != value for name, value in AVX2.items()):
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=os.environ | AVX2, check=False).returncode)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    arguments = machine_arguments(parser)
    if arguments.device != "cpu":
        parser.error("--device cuda: this benchmark is about CPUs.")
    width, depth, length, rounds = (128, 2, 64, 2) if arguments.quick else (576, 15, 1024, 3)
    figures = {
        "shape": {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": VOCABULARY},
        "length": length,
        "models": {name: measure(name, width, depth, length, rounds) for name in NAMES},
    }
    write_results("half_prompts", figures, arguments.device)


if __name__ == "__main__":
    main()
