"""Every registered mixer in a small SPADE and a small BST, the one that docs/extending.md shows included."""

import pytest
import torch

from hf_hybrid_ssm import (
    BstConfig,
    BstForCausalLM,
    BstForSequenceClassification,
    SpadeConfig,
    SpadeForCausalLM,
    register_mixer,
)
from hf_hybrid_ssm.hub.export import export_code
from hf_hybrid_ssm.layers.mixers import MIXERS, registry
from hf_hybrid_ssm.layers.mixers.base import Mixer, mixer_state, named_states
from tests.layers.shown_mixer import LeakyAverage
from tests.models import invariances as inv

NAMES = (*registry.BUILT_IN, "leaky_average")
ONE_FILTER = ("ema", "hyena", "leaky_average", "lstm")
COMMON = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "sliding_window": 6, "ssm_layers": [0, 1], "filter_length": 16, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BST = COMMON | {"head_dim": 8, "initializer_range": 0.5}
FAMILIES = {"spade": (SpadeForCausalLM, SpadeConfig, COMMON), "bst": (BstForCausalLM, BstConfig, BST)}


@pytest.fixture(autouse=True)
def registered():
    register_mixer("leaky_average", LeakyAverage)
    yield
    for table in (registry.MIXERS, registry.MIXER_TYPES, registry._CONFIG_OPTIONS):
        del table["leaky_average"]


@pytest.fixture(params=[(family, name) for family in FAMILIES for name in sorted(NAMES)], ids="-".join)
def model(request):
    family, name = request.param
    model_class, config_class, fields = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(ssm_type=name, **fields)).eval()
    mixers = [module for module in model.modules() if type(module) is MIXERS[name]]
    assert len(mixers) >= 2 and not any(mixer.bidirectional for mixer in mixers)
    return model


def test_cached_padded_packed_and_rolled_back(model):
    ids = inv.random_ids(model, 2, 17)
    inv.check_split(model, ids, [1, 2, 5, 13])
    inv.check_reorder(model, ids, torch.tensor([1, 0]), 9)
    inv.check_rollback(model, ids, [4, 11], removed=3)
    rows = [inv.random_ids(model, 1, length, seed=length) for length in (3, 14, 8)]
    for side in ("left", "right"):
        inv.check_padded(model, rows, side)
        inv.check_padded_continuation(model, rows, rows[::-1], side)
    inv.check_packed(model, rows, "seq_idx")


@pytest.mark.parametrize("variant", ["mh", "mf"])
@pytest.mark.parametrize("name", ONE_FILTER)
def test_one_filter_cannot_serve_many(name, variant):
    with pytest.raises(ValueError, match=rf"context_variant='{variant}' needs several.*ssm_type='{name}'.*'s4'"):
        BstConfig(ssm_type=name, context_variant=variant, **BST)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_encoders_look_both_ways(name):
    config = BstConfig(ssm_type=name, bidirectional=True, **BST)
    if name == "leaky_average":
        with pytest.raises(ValueError, match="LeakyAverage looks back only"):
            BstForSequenceClassification(config)
        return
    torch.manual_seed(0)
    model = BstForSequenceClassification(config).eval().double()
    rows = [inv.random_ids(model, 1, length, seed=length) for length in (3, 14, 8)]
    ids, mask = inv.pad_rows(rows, 0, "right")
    together = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(together, torch.cat([model(row).logits for row in rows]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_options_come_from_fields_of_the_configuration(family, tmp_path):
    model_class, config_class, fields = FAMILIES[family]
    config = config_class(ssm_type="leaky_average", leak_spread=0.5, leak_of_mine=7.0, **fields)
    assert _spreads(model_class(config)) == {0.5}
    register_mixer("leaky_average", LeakyAverage, config_options={"spread": "leak_of_mine"})
    assert _spreads(model_class(config)) == {7.0}
    config.save_pretrained(tmp_path)
    assert _spreads(model_class(config_class.from_pretrained(tmp_path))) == {7.0}
    assert _spreads(model_class(config_class(ssm_type="leaky_average", **fields))) == {4.0}  # the mixer's default


def _spreads(model):
    return {module.spread for module in model.modules() if isinstance(module, LeakyAverage)}


def test_what_cannot_be_registered():
    class Mine(Mixer):
        pass

    with pytest.raises(TypeError, match="subclass of Mixer"):
        register_mixer("mine", torch.nn.Linear)
    with pytest.raises(ValueError, match=r"There is a mixer 's4d' already, .*\.S4D"):
        register_mixer("s4d", Mine)
    for config_class in (SpadeConfig, BstConfig):
        with pytest.raises(ValueError, match=r"ssm_type='mine' is not one of 's4', .*register_mixer"):
            config_class(ssm_type="mine")


def test_code_of_a_registered_mixer_is_not_exported(tmp_path):
    model = SpadeForCausalLM(SpadeConfig(ssm_type="leaky_average", **COMMON))
    model.save_pretrained(tmp_path)
    for arguments in ((model, tmp_path), (tmp_path,)):
        with pytest.raises(ValueError, match=r"ssm_type='leaky_average'.*not exported"):
            export_code(*arguments)
    assert not list(tmp_path.glob("*.py"))


def test_states_of_one_tensor_or_several():
    one, two = torch.zeros(2, 3), torch.ones(2, 4)
    assert named_states(None) == {} and mixer_state({"keys": one}) is None
    assert mixer_state(named_states(one) | {"keys": two}) is one
    many = tuple(torch.full((1,), float(index)) for index in range(12))
    assert all(a is b for a, b in zip(mixer_state(named_states(many)), many, strict=True))
