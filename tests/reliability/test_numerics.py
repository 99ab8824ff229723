"""Numbers of tiny models stay finite and close: extreme inputs, low precision, great depth, a bad batch."""

import itertools
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.reporting import THOROUGH
from tests.tiny_models import (
    BST,
    COMBINATIONS,
    EVERY,
    FEW,
    TOKENS,
    build,
    class_with_loss,
    classes_of,
    config_of,
    inputs_for,
    labels_for,
)

LENGTH = 70  # beyond every window, chunk and block of the tiny models
# largest |error| over largest |value| of a forward pass against float64: some 25 roundings of a unit's size
ERROR_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.0125}
# which old states are retrieved is a choice: where two score alike, a rounding makes another one
CHOOSES = "bst with memory"
SPREAD_BOUND = 1e3
# The loss does not depend on them, whatever they are: a softmax takes away what all keys have in common, and a
# LayerNorm after every reader of the residual stream what all channels have. Their gradients are rounding.
WITHOUT_EFFECT = ("k_proj.bias", "memory.collapse_bias")
VARIANTS = list(EVERY) if THOROUGH else FEW
Inputs = dict[str, torch.Tensor]


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model as `from_pretrained(dtype=...)` gives it: what it declares float32 stays so."""
    if dtype == torch.float32:
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, dtype=dtype).eval()


# -- extreme inputs -------------------------------------------------------------------------------------------------


def _embeddings(model: PreTrainedModel, scale: float) -> Inputs:
    inputs = inputs_for(model, length=LENGTH)
    return {"inputs_embeds": model.get_input_embeddings()(inputs.pop("input_ids")) * scale, **inputs}


def _padding(model: PreTrainedModel, rows: int) -> Inputs:
    inputs = inputs_for(model, length=LENGTH)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][-rows:] = 0
    return inputs


def _repeated(model: PreTrainedModel) -> Inputs:
    inputs = inputs_for(model, length=10 * LENGTH)
    return {**inputs, "input_ids": torch.full_like(inputs["input_ids"], 7)}


EXTREME_INPUTS: dict[str, Callable[[PreTrainedModel], Inputs]] = {
    "embeddings of zero": lambda model: _embeddings(model, 0.0),
    "embeddings times 1e4": lambda model: _embeddings(model, 1e4),
    "embeddings times 1e-20": lambda model: _embeddings(model, 1e-20),
    "one token, 700 times": _repeated,
    "padding alone": lambda model: _padding(model, 2),
    "a row of padding beside another": lambda model: _padding(model, 1),
    "one token": lambda model: inputs_for(model, length=1),
}


def not_finite(model: PreTrainedModel, kind: str) -> list[str]:
    """What is not finite at an extreme input: the output, or gradients of its mean square."""
    inputs = EXTREME_INPUTS[kind](model)
    inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    model.zero_grad()
    output = model(**inputs)[0]
    if not bool(output.isfinite().all()):
        return ["output"]
    if model.dtype == torch.float16:  # trains under a loss scale, hence no gradients here
        return []
    (output.float() / output.detach().float().abs().amax().clamp(min=1)).square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]


@pytest.mark.parametrize("dtype", ERROR_BOUNDS if THOROUGH else [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("variant", "name"), COMBINATIONS if THOROUGH else [(v, class_with_loss(v)) for v in FEW])
def test_extreme_inputs_give_finite_numbers(variant, name, dtype):
    model = in_dtype(build(variant, name), dtype)
    assert [(kind, fault) for kind in EXTREME_INPUTS for fault in not_finite(model, kind)] == []


# -- low precision, depth, a bad batch ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_low_precision_costs_few_digits(variant, record_property):
    """Largest difference from the float64 model's output, over its largest value.

    "bst with memory" has no bound: which old states it retrieves is a choice, and a rounding can make another one.
    """
    inputs = inputs_for(build(variant), length=LENGTH)
    exact = build(variant).double()(**inputs)[0]
    for dtype, bound in ERROR_BOUNDS.items():
        found = in_dtype(build(variant), dtype)(**inputs)[0]
        error = float((found.double() - exact).abs().amax() / exact.abs().amax())
        record_property(str(dtype), f"{error:.1e}")
        assert torch.finfo(dtype).eps / 100 < error
        assert error < bound or variant == CHOOSES


def deep(variant: str, layers: int) -> PreTrainedModel:
    """A fresh model of many layers, of the types that the variant has."""
    _, own = EVERY[variant]
    fields: dict = {"num_hidden_layers": layers}
    if own.get("layer_types") is not None:
        fields["layer_types"] = list(itertools.islice(itertools.cycle(own["layer_types"]), layers))
    elif own.get("ssm_layers") == BST["ssm_layers"]:
        fields["ssm_layers"] = list(range(0, layers, 2))
    if "num_decoder_layers" in own:
        fields["num_decoder_layers"] = layers
    torch.manual_seed(0)
    return classes_of(variant)[class_with_loss(variant)](config_of(variant, **fields))


def gradient_sizes(model: PreTrainedModel) -> dict[str, float]:
    """Root mean square of each trained parameter's gradient."""
    ids = torch.randint(3, TOKENS["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=labels_for(model, ids)).loss.backward()
    return {
        name: 0.0 if p.grad is None else float(p.grad.double().square().mean().sqrt())
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def without_gradient(sizes: dict[str, float]) -> list[str]:
    """Parameters whose gradient is zero or not finite although the loss depends on them."""
    return [
        name
        for name, size in sizes.items()
        if not math.isfinite(size) or (size == 0 and not name.endswith(WITHOUT_EFFECT))
    ]


def spread_over_layers(sizes: dict[str, float]) -> float:
    """The largest layer's gradient over the smallest's, in each stack; the greater of both stacks."""
    layers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, size in sizes.items():
        if match := re.match(r"(.*layers)\.(\d+)\.", name):
            layers[match[1]][match[2]] += size**2
    return max(math.sqrt(max(stack.values()) / min(stack.values())) for stack in layers.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_pass_48_layers(variant, record_property):
    """Finite and not zero at initialisation; *spread* is the largest layer's gradient over the smallest's."""
    sizes = gradient_sizes(deep(variant, 48))
    record_property("spread", f"{spread_over_layers(sizes):.1f}")
    assert without_gradient(sizes) == []
    assert spread_over_layers(sizes) < SPREAD_BOUND


@pytest.mark.parametrize("variant", EVERY if THOROUGH else ["longhorn", "spade s4 trained"])
def test_training_recovers_from_a_bad_batch(variant, record_property):
    """Random tokens amid rows of period 3: mean loss of ten steps before, of the batch, of steps 11 to 20 after it."""
    torch.manual_seed(0)
    model = classes_of(variant)[class_with_loss(variant)](config_of(variant)).train()
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=5e-3), torch.Generator().manual_seed(1)
    losses, bad = [], 90 if THOROUGH else 40
    for step in range(bad + 21):
        ids = torch.randint(3, 13, (8, 3), generator=generator).repeat(1, 8)
        if step == bad:
            ids = torch.randint(3, TOKENS["vocab_size"], ids.shape, generator=generator)
        labels = labels_for(model, ids)
        if step == bad and "Classification" in type(model).__name__:  # random tokens have a class all the same
            labels = 1 - labels
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    before, at, after = sum(losses[bad - 10 : bad]) / 10, losses[bad], sum(losses[-10:]) / 10
    for name, value in (("before", before), ("at", at), ("after", after)):
        record_property(name, f"{value:.2f}")
    assert at > 1.3 * before, "the batch was not bad"
    assert after < 1.1 * before
