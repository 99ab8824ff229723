"""Nothing that a model computed from its weights outlives them: a model whose weights were written through `.data`,
where torch does not look, computes what a new model with these weights does."""

import pytest
import torch
from transformers import DynamicCache

from tests.counting import count_operations
from tests.tiny_models import EVERY, build, class_with_loss, compiles, inputs_for
from tests.weight_changes import changed_values


@torch.no_grad()
def outputs(model) -> list[torch.Tensor]:
    """The output for rows of ids, and of a language model for three tokens after them."""
    inputs = inputs_for(model)
    found = [model(**inputs).logits]
    if model.can_generate() and not model.config.is_encoder_decoder:
        cache = DynamicCache(config=model.config)
        found += [model(ids, past_key_values=cache).logits for ids in inputs["input_ids"].split((9, 1, 1, 1), dim=1)]
    return found


@pytest.mark.parametrize("variant", EVERY)
def test_writes_through_data_are_seen(variant):
    model, other = build(variant), build(variant)
    before = outputs(model)
    values = changed_values(model)
    for name, parameter in model.named_parameters():  # the average of an EMA library, dist.broadcast(p.data)
        parameter.data.copy_(values[name])
    other.load_state_dict(model.state_dict())
    after = outputs(model)
    for now, wanted, then in zip(after, outputs(other), before, strict=True):
        torch.testing.assert_close(now, wanted, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(now, then)


@compiles
@pytest.mark.parametrize("variant", ["spade s4 window", "spade frozen hyena", "bst mh s4"])
@torch.no_grad()
def test_compiled_models_use_no_kernel_of_other_weights(variant):
    """They follow writes in place into what trains; what is frozen was computed from before, and they refuse."""
    model, other = build(variant), build(variant)
    inputs = inputs_for(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    compiled(**inputs), compiled(**inputs)
    parameters = list(model.parameters())
    torch._foreach_mul_([parameter for parameter in parameters if parameter.requires_grad], 1.1)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(compiled(**inputs).logits, other(**inputs).logits, rtol=1e-5, atol=1e-5)
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    assert bool(frozen) == (not variant.startswith("bst"))
    if frozen:
        torch._foreach_mul_(frozen, 1.1)
        with pytest.raises(RuntimeError, match=r"frozen parameters were written in place.*clear_kernel_caches\(\)"):
            compiled(**inputs)
        model.clear_kernel_caches()
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(compiled(**inputs).logits, other(**inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", [variant for variant in EVERY if "spade" in variant or "bst" in variant])
def test_clearing_reaches_every_layer(variant):
    model = build(variant)
    outputs(model)
    kept = lambda module: getattr(module, "_kernel_cache", None) or getattr(module, "_token_cache", None)  # noqa: E731
    keeping = [module for module in model.modules() if kept(module)]
    model.clear_kernel_caches()
    assert not any(kept(module) or module._marks for module in keeping)
    before = count_operations(lambda: outputs(model)).total()
    assert (count_operations(lambda: outputs(model)).total() < before) == bool(keeping)  # it was computed again
    assert keeping or "lstm" in variant or class_with_loss(variant).endswith("Classification")
