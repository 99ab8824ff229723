"""What states are bound to: everything that a state depends on, and nothing else."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn

from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.spade.options_spade import ScaleNorm
from hf_hybrid_ssm.serving import context as contexts
from hf_hybrid_ssm.serving.model_identity import architecture, identity_now, model_identity, unknown_code
from tests.models.invariances import random_ids
from tests.tiny_models import VARIANTS, config_of, own_language_model

FAMILIES = ["longhorn + window and full attention", "bst mh s4", "lmu-isa", "spade s4 window"]
SHAPES = [(2, 6), (6, 2), (12,), (1, 2, 6)]
NORMS = (RMSNorm, nn.LayerNorm, ScaleNorm)


@pytest.mark.parametrize("variant", FAMILIES)
def test_fields_without_effect_on_a_state_take_no_part(variant):
    """Dropout above all: a context read by a model in evaluation is that of the model trained with another rate."""
    config = config_of(variant)
    before, rates = architecture(config), [name for name in vars(config) if "dropout" in name]
    assert rates or variant == "longhorn + window and full attention"
    for name in [*rates, "initializer_range"]:
        if hasattr(config, name):
            setattr(config, name, 0.375)
    config.use_cache, config.pad_token_id, config.bos_token_id, config.eos_token_id = False, 5, 6, 7
    config.use_linear_cross_entropy = not config.use_linear_cross_entropy
    assert architecture(config) == before
    config.hidden_size *= 2
    assert architecture(config) != before


def test_shapes_and_dtypes_are_part_of_a_digest():
    """The same bytes in another shape or dtype are other states, and other weights."""
    values = torch.arange(12, dtype=torch.float32)
    tensors = [values.view(shape) for shape in SHAPES] + [values.view(torch.int32).view(SHAPES[0])]
    assert len({contexts._digest({}, {"layers.0.scan": tensor}) for tensor in tensors}) == len(tensors)
    assert contexts._digest({}, {"a": values}) != contexts._digest({}, {"b": values})
    assert contexts._digest({"num_tokens": 40}, {}) != contexts._digest({"num_tokens": 10}, {})
    model = own_language_model("longhorn")
    decoder, found, now = model.get_decoder(), set(), set()
    for tensor in tensors:
        decoder.register_buffer("extra", tensor)
        found.add(model_identity(model)["weights"])
        now.add(identity_now(model))
    assert len(found) == len(tensors) == len(now)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight * 2)
    assert model_identity(other)["weights"] == model_identity(model)["weights"]  # the head reads states and makes none
    assert identity_now(other) == identity_now(model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_to_which_nothing_was_done_computes_as_its_configuration_says(variant, tmp_path):
    """Before and after it was used, copied, saved, loaded and cast: so its contexts are there for another process."""
    model = own_language_model(variant)
    ids, before = random_ids(model, 1, 9), identity_now(model)
    assert model_identity(model)["computation"] == {} and unknown_code(model) is None
    with torch.no_grad():
        model(ids, output_hidden_states=True)  # transformers leaves its hooks in place
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    model.gradient_checkpointing_enable()
    model.eval()
    assert identity_now(model) == before == identity_now(copy.deepcopy(model))
    assert unknown_code(model) is None
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert identity_now(again) == before and model_identity(again) == model_identity(model)
    assert identity_now(again.double()) != before
    assert model_identity(again)["computation"] == {}


# -- what is done to a model ------------------------------------------------------------------------------------------


def norm_of(model) -> nn.Module:
    return next(module for module in model.get_decoder().layers.modules() if isinstance(module, NORMS))


class Doubled(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return 2 * self.norm(x)


def another_norm(model):
    name = next(name for name, module in model.named_modules() if module is norm_of(model))
    model.set_submodule(name, Doubled(norm_of(model)))


def no_last_norm(model):
    model.get_decoder().norm = None


DONE = {
    "an attribute": (lambda model: setattr(norm_of(model), "eps", 1.0), r"\.eps"),
    "another module": (another_norm, r"norm"),
    "a module that is gone": (no_last_norm, "^norm$"),
    "training": (lambda model: model.train(), "^training$"),
    "training of one module": (lambda model: norm_of(model).train(), "^training$"),
}


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("done", DONE)
def test_what_is_done_to_a_model_is_part_of_it_and_can_be_undone(done, variant):
    model = own_language_model(variant)
    before, named = identity_now(model), model_identity(model)
    change, name = DONE[done]
    changed = copy.deepcopy(model)
    change(changed)
    assert identity_now(changed) != before
    other = model_identity(changed)
    assert {key for key in named.keys() - {"weights"} if named[key] != other[key]} == {"computation"}
    assert re.search(name, " ".join(other["computation"]))
    assert identity_now(model) == before


@pytest.mark.parametrize("variant", FAMILIES)
def test_adapters_and_their_switches(variant):
    """Each way to compute has a name, and coming back to one finds it again."""
    peft = pytest.importorskip("peft")
    model = own_language_model(variant)
    lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, r=2)
    wrapped = peft.get_peft_model(model, lora, adapter_name="one")
    wrapped.add_adapter("two", lora)
    wrapped.eval()
    layers = [module for module in model.modules() if hasattr(module, "scale_layer")]

    def scaled(factor):
        for layer in layers:
            layer.scale_layer(factor)

    ways = [
        partial(wrapped.set_adapter, "one"),
        partial(scaled, 3.0),
        partial(scaled, 1 / 3),
        partial(wrapped.set_adapter, "two"),
    ]
    ways += [wrapped.base_model.disable_adapter_layers, wrapped.base_model.enable_adapter_layers]
    ways += [wrapped.merge_adapter, wrapped.unmerge_adapter]
    found = []
    for way in ways:
        way()
        found.append(repr(model_identity(model)["computation"]))
        assert unknown_code(model) is None
    first, thrice, again, two, off, on, merged, apart = found
    assert first == again and two == on == apart
    assert len({first, thrice, two, off, merged}) == 5
    assert "base_layer" not in first and "lora_A" not in first
    norm_of(model).eps = 1.0
    assert repr(model_identity(model)["computation"]) != two


# -- code that has no name --------------------------------------------------------------------------------------------


def steered(module, arguments, output):
    return output


def looked(module, arguments):
    return None


def by_hook(model, monkeypatch):
    model.get_decoder().layers[1].register_forward_hook(steered)


def by_hook_before(model, monkeypatch):
    norm_of(model).register_forward_pre_hook(looked)


def by_hook_of_all(model, monkeypatch):
    handle = nn.modules.module.register_module_forward_hook(steered)
    monkeypatch.setattr(model, "_handle", handle, raising=False)
    return handle


def by_forward(model, monkeypatch):
    norm = norm_of(model)
    norm.forward = partial(steered, norm, ())


def by_forward_of_class(model, monkeypatch):
    monkeypatch.setattr(type(norm_of(model)), "forward", lambda self, x, *more: x)


def by_forward_of_model(model, monkeypatch):
    forward = model.forward
    model.forward = lambda *arguments, **options: forward(*arguments, **options)


UNKNOWN = {
    "a hook": (by_hook, r"a forward hook of model\.layers\.1"),
    "a hook before": (by_hook_before, r"a forward hook of model\.layers\.0\..*norm.*"),
    "a hook of all modules": (by_hook_of_all, "a forward hook of all modules"),
    "a forward": (by_forward, r"another forward of model\.layers\.0\..*norm.*"),
    "a forward of the class": (by_forward_of_class, r"another forward of model\.layers\.0\..*norm.*"),
    "a forward of the model": (by_forward_of_model, "another forward of .*ForCausalLM"),
}


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("way", UNKNOWN)
def test_code_between_is_told_by_its_place(way, variant, monkeypatch):
    model = own_language_model(variant)
    put, name = UNKNOWN[way]
    handle = put(model, monkeypatch)
    try:
        found = unknown_code(model)
    finally:
        if handle is not None:
            handle.remove()
    assert found is not None and re.fullmatch(name, found), found


def test_code_of_libraries_that_move_tensors_is_known():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # of another test of this process
    model = own_language_model("longhorn")
    accelerate.hooks.add_hook_to_module(model.get_decoder().layers[0], accelerate.hooks.AlignDevicesHook("cpu"))
    model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model, evaluation_mode=True)
    assert "forward" in vars(model) and "forward" in vars(model.get_decoder().layers[0])
    assert unknown_code(model) is None
