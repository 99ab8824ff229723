"""(a) Every family, plain, padded and packed, and every head, on the device against the CPU in float32.

In float32, and in bfloat16 with the same rounded weights: outputs and the gradients of all weights, by norms of
differences. A gradient's error is relative to at least 3 % of all gradients' norm: of some sums only rounding is left.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

import hf_hybrid_ssm
from benchmarks.gpu.families import FAMILIES, ROWS, small
from benchmarks.gpu.settings import Settings
from benchmarks.timing.models import TOKENS, batch_of, config_fields, random_rows
from hf_hybrid_ssm.models import FAMILIES as DECLARED
from hf_hybrid_ssm.ops.core.dispatch import backend

# outputs and gradients: sums in another order turn a few units of a ReLU, and bfloat16 rounds every layer's results
BOUNDS = {torch.float32: (1e-4, 3e-3), torch.bfloat16: (3e-2, 2e-1)}
LEAST = 0.03
STACKS = {"longhorn": "Longhorn", "bst": "BST SH", "lmu_isa": "LMU-ISA", "spade": "SPADE", "spade_seq2seq": "SPADE"}
"""What the layers are in models of each type."""
Inputs = dict[str, torch.Tensor]


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Those without attention first, of which the device's compiler has nothing to compile; short rows are so too."""
    for without in (True, False):
        for name in FAMILIES:
            if without == (name in ("Longhorn", "LMU-ISA")):
                for rows in ROWS:
                    yield f"{name} {rows}", partial(stack, settings, name, rows)
        if without:
            for family in DECLARED:
                for head in dict.fromkeys(family.heads.values()):
                    yield head, partial(headed, settings, family.model_type, head)


def stack(settings: Settings, name: str, rows: str) -> dict:
    model = small(name, settings, device="cpu").train()
    inputs = batch_of(rows, random_rows(2, settings.pick(384, 24), model.config.vocab_size))
    return in_both(settings, model, inputs)


def headed(settings: Settings, model_type: str, head: str) -> dict:
    width, depth = settings.pick((128, 2), (32, 1))
    _, fields = config_fields(STACKS[model_type], width, depth, settings.pick(32, 8))
    if model_type == "spade_seq2seq":
        fields["num_decoder_layers"] = depth
    if head == "BstForMaskedLM":
        fields["bidirectional"] = True
    torch.manual_seed(0)
    model = getattr(hf_hybrid_ssm, head)(AutoConfig.for_model(model_type, **fields, **TOKENS, vocab_size=64)).eval()
    ids = random_rows(2, settings.pick(48, 24), 64)
    inputs = {"input_ids": torch.stack((ids, ids.flip(1)), 1) if "MultipleChoice" in head else ids}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = ids[:, :16]
    return in_both(settings, model, inputs)


def in_both(settings: Settings, model: PreTrainedModel, inputs: Inputs) -> dict:
    found: dict[str, Any] = {}
    errors = []
    for dtype, (outputs, gradients) in BOUNDS.items():
        name = str(dtype).removeprefix("torch.")
        errors_of = against_cpu(settings, model, inputs, dtype)
        if settings.only_launches:
            continue
        found[name] = errors_of
        if not (errors_of["outputs"] <= outputs and errors_of["gradients"] <= gradients):  # nor NaN
            errors.append(f"{name}: outputs may be off by {outputs:g}, gradients by {gradients:g}: {errors_of}")
    return found | ({"error": "; ".join(errors)} if errors else {})


def against_cpu(settings: Settings, model: PreTrainedModel, inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    here = copy.deepcopy(model).to(dtype).to(settings.device)
    got = outputs_and_gradients(here, inputs, settings.device)
    if settings.only_launches:
        return {}
    there = copy.deepcopy(model).to(dtype).float()
    with backend("torch"):
        want = outputs_and_gradients(there, inputs, "cpu")
    outputs, gradients = ([name for name in want if name.startswith("output ") == of] for of in (True, False))
    least = LEAST * sum(float(want[name].norm()) ** 2 for name in gradients) ** 0.5
    errors = {name: off(got[name], want[name], least if name in gradients else 0.0) for name in want}
    worst = max(gradients, key=errors.__getitem__)
    found = {"outputs": max(errors[name] for name in outputs), "gradients": errors[worst]}
    return found | {"worst_gradient": worst}


def outputs_and_gradients(model: PreTrainedModel, inputs: Inputs, device: str) -> Inputs:
    """Those of real tokens; gradients are those of the loss, or without labels of a weighted sum of all outputs."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    found = model(**{name: tensor.to(device) for name, tensor in inputs.items()}, **options)
    if "labels" in inputs:
        real = inputs["labels"] != -100
        outputs, loss = {"logits": found.logits.cpu()[real]}, found.loss
    else:
        outputs = {name: t for name, t in found.items() if isinstance(t, torch.Tensor) and t.requires_grad}
        loss = sum((t * weights_like(t)).float().sum() for t in outputs.values())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {f"output {name}": t for name, t in outputs.items()} | gradients
    return {name: t.detach().cpu().float() for name, t in found.items()}


def weights_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor)


def off(got: torch.Tensor, want: torch.Tensor, least: float) -> float:
    return float((got - want).norm() / want.norm().clamp(min=max(least, 1e-6)))
