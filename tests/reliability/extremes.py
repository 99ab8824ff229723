"""Tiny models under what should not happen but does: extreme inputs, low precision, great depth, a bad batch."""

import itertools
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tests.tiny_models import (
    BST,
    EVERY,
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


# -- extreme inputs -------------------------------------------------------------------------------------------------


def _embeddings(model: PreTrainedModel, scale: float) -> dict[str, torch.Tensor]:
    inputs = inputs_for(model, length=LENGTH)
    embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
    return {**inputs, "inputs_embeds": embedded * scale}


def _all_padding(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    inputs = inputs_for(model, length=LENGTH)
    return {**inputs, "attention_mask": torch.zeros_like(inputs["input_ids"])}


def _one_row_of_padding(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    inputs = _all_padding(model)
    inputs["attention_mask"][0] = 1
    return inputs


def _repeated(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    inputs = inputs_for(model, length=10 * LENGTH)
    return {**inputs, "input_ids": torch.full_like(inputs["input_ids"], 7)}


EXTREME_INPUTS: dict[str, Callable[[PreTrainedModel], dict[str, torch.Tensor]]] = {
    "embeddings of zero": lambda model: _embeddings(model, 0.0),
    "embeddings times 1e4": lambda model: _embeddings(model, 1e4),
    "embeddings times 1e-20": lambda model: _embeddings(model, 1e-20),
    "one token, 700 times": _repeated,
    "padding alone": _all_padding,
    "a row of padding beside another": _one_row_of_padding,
    "one token": lambda model: inputs_for(model, length=1),
}


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model as `from_pretrained(dtype=...)` gives it: what it declares float32 stays so."""
    if dtype == torch.float32:
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, dtype=dtype).eval()


def not_finite(model: PreTrainedModel, kind: str) -> list[str]:
    """What is not finite at an extreme input: the output, or gradients of its mean square."""
    inputs = {
        name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in EXTREME_INPUTS[kind](model).items()
    }
    model.zero_grad()
    output = model(**inputs)[0]
    if not bool(output.isfinite().all()):
        return ["output"]
    if model.dtype == torch.float16:  # trains under a loss scale, hence no gradients here
        return []
    (output.float() / output.detach().float().abs().amax().clamp(min=1)).square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]


# -- low precision --------------------------------------------------------------------------------------------------


@torch.no_grad()
def forward_error(variant: str, class_name: str, dtype: torch.dtype, length: int = LENGTH) -> float:
    """Largest |output - float64 output| over the largest |float64 output|."""
    model = in_dtype(build(variant, class_name), dtype)
    inputs = inputs_for(model, length=length)
    exact = build(variant, class_name).double()(**inputs)[0]
    return float((model(**inputs)[0].double() - exact).abs().amax() / exact.abs().amax())


# -- depth ----------------------------------------------------------------------------------------------------------


def deep(variant: str, layers: int) -> PreTrainedModel:
    """A fresh model of many layers, of the types that the variant has."""
    _, own = EVERY[variant]
    fields: dict = {"num_hidden_layers": layers}
    if own.get("block_types") is not None:
        fields["block_types"] = list(itertools.islice(itertools.cycle(own["block_types"]), layers))
    elif own.get("ssm_layers") == BST["ssm_layers"]:
        fields["ssm_layers"] = list(range(0, layers, 2))
    if "num_decoder_layers" in own:
        fields["num_decoder_layers"] = layers
    torch.manual_seed(0)
    return classes_of(variant)[class_with_loss(variant)](config_of(variant, **fields))


def gradient_sizes(model: PreTrainedModel, seed: int = 0) -> dict[str, float]:
    """Root mean square of each trained parameter's gradient."""
    ids = torch.randint(3, TOKENS["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=labels_for(model, ids)).loss.backward()
    return {
        name: 0.0 if p.grad is None else float(p.grad.double().square().mean().sqrt())
        for name, p in model.named_parameters()
        if p.requires_grad
    }


# The loss does not depend on them, whatever they are: a softmax takes away what all keys have in common, and a
# LayerNorm after every reader of the residual stream what all channels have. Their gradients are rounding.
WITHOUT_EFFECT = ("k_proj.bias", "memory.collapse_bias")


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


# -- a bad batch ----------------------------------------------------------------------------------------------------


def losses_around_a_bad_batch(variant: str, bad_at: int, steps: int) -> Iterator[float]:
    """Losses of a small training to continue rows of period 3, and one batch that has none amid them."""
    torch.manual_seed(0)
    model = classes_of(variant)[class_with_loss(variant)](config_of(variant)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        ids = torch.randint(3, 13, (8, 3), generator=generator).repeat(1, 8)
        if step == bad_at:
            ids = torch.randint(3, TOKENS["vocab_size"], ids.shape, generator=generator)
        labels = labels_for(model, ids)
        if step == bad_at and "Classification" in type(model).__name__:  # random tokens have a class all the same
            labels = 1 - labels
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


@dataclass(frozen=True)
class Spike:
    """Mean losses of ten steps before a bad batch, of that batch, and of the second ten steps after it."""

    before: float
    at: float
    after: float

    @property
    def recovered(self) -> bool:
        """The batch was bad, and what training had reached is there again."""
        return self.at > 1.3 * self.before and self.after < 1.1 * self.before


def spike(variant: str, bad_at: int = 60) -> Spike:
    losses = list(losses_around_a_bad_batch(variant, bad_at, bad_at + 21))
    return Spike(sum(losses[bad_at - 10 : bad_at]) / 10, losses[bad_at], sum(losses[-10:]) / 10)
