"""LoRA on parameters that are no linear layer's weight (`LoraConfig(target_parameters=...)`)."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from tests.tiny_models import EVERY, batch_of, build, class_with_loss

peft = pytest.importorskip("peft")


def targets(model) -> list[list[str]]:
    """The parameters that PEFT takes (matrices and stacks of them) of one module of each kind that it has no own layer
    for; it cannot take those of a module and of one inside. Tables that an adaptive softmax shares are no target."""
    found: dict[type, dict[str, str]] = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        kind = type(model.get_submodule(path))
        is_shared = leaf.startswith(("table_", "projection_"))
        if parameter.dim() in (2, 3) and kind not in (nn.Linear, nn.Embedding) and not is_shared:
            found.setdefault(kind, {})[leaf] = name
    return [list(names.values()) for names in found.values()]


@pytest.mark.parametrize("variant", EVERY)
def test_target_parameters_train_decode_and_merge(variant):
    for names in targets(build(variant)):
        check(variant, names)


def check(variant: str, names: list[str]) -> None:
    model, batch = build(variant), batch_of(variant)
    if "Classification" in class_with_loss(variant):
        batch["labels"] = batch["labels"][:, 0] % 2
    base = model(**batch).logits
    options = {"target_modules": [], "target_parameters": names, "init_lora_weights": False}
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, **options))
    adapted(**batch).loss.backward()
    trained = {name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained and [name for name, gradient in trained.items() if gradient is None or not gradient.any()] == []
    with torch.no_grad():
        logits = adapted(**batch).logits
        assert not torch.allclose(logits, base)
        if model.can_generate() and not model.config.is_encoder_decoder:
            cache = DynamicCache(config=model.config)
            pieces = [
                adapted(ids, past_key_values=cache).logits
                for ids in batch["input_ids"].split((8, 1, 1, 1, 1, 2), dim=1)
            ]
            torch.testing.assert_close(torch.cat(pieces, 1), logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(adapted.merge_and_unload()(**batch).logits, logits, rtol=1e-4, atol=1e-4)
