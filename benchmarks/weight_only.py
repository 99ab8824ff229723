"""What do weights of 8 bits, or bfloat16, save when decoding, which is bound by the bytes of the weights?

One row, width 1024, 24 layers (Longhorn 48), a vocabulary of 32,000. 8 bits are torchao's weight-only quantization of
every linear layer, over bfloat16 on CUDA and over float32 or bfloat16 on a CPU; they are left out where torchao is not
installed.
"""

import argparse
import gc
import importlib.util
from collections.abc import Callable

import torch
from timing import machine_arguments, paired_seconds, write_results
from timing.models import FAMILIES, build, decoder
from transformers import PreTrainedModel

VOCABULARY = 32000
STEPS = 4
FORMS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "int8 over float32": (torch.float32, True),
    "int8 over bfloat16": (torch.bfloat16, True),
}


def model_of(name: str, form: str, width: int, depth: int, device: str) -> PreTrainedModel:
    dtype, is_quantized = FORMS[form]
    model = build(name, width, depth, vocabulary=VOCABULARY, device=device, dtype=dtype)
    if is_quantized:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    return model


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(3, 35, device=model.device).view(1, 32)
    with torch.inference_mode():
        return model(ids).logits.float()


def measured(name: str, width: int, depth: int, rounds: int, device: str) -> dict:
    """Milliseconds per token of every form in turns, and how far its logits are from float32's."""
    figures: dict = {"milliseconds_per_token": {}, "logits_off": {}, "errors": {}}
    steps: dict[str, Callable] = {}
    exact = None
    for form in FORMS:
        if FORMS[form][1] and importlib.util.find_spec("torchao") is None:
            figures["errors"][form] = "torchao is not installed"
            continue
        try:
            model = model_of(name, form, width, depth, device)
            logits = logits_of(model)
            steps[form] = decoder(model, STEPS)
            steps[form]()
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            steps.pop(form, None)
            figures["errors"][form] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            continue
        exact = logits if exact is None else exact
        figures["logits_off"][form] = round(float((logits - exact).abs().max() / exact.abs().max()), 5)
    seconds = paired_seconds(steps, rounds=rounds, warm_up=1, device=device)
    figures["milliseconds_per_token"] = {form: round(1000 * value / STEPS, 2) for form, value in seconds.items()}
    figures["times_as_fast_as_float32"] = {
        form: round(seconds["float32"] / value, 2) for form, value in seconds.items()
    }
    del steps
    gc.collect()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    arguments = machine_arguments(parser)
    width, depth, rounds = (128, 2, 2) if arguments.quick else (1024, 24, 5)
    figures = {
        "shape": {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": VOCABULARY},
        "torchao": importlib.util.find_spec("torchao") is not None,
        "families": {name: measured(name, width, depth, rounds, arguments.device) for name in arguments.families},
    }
    write_results("weight_only", figures, arguments.device)


if __name__ == "__main__":
    main()
