"""What a context is bound to: everything that a state depends on, and nothing else."""

import copy

import pytest
import torch

from hf_hybrid_ssm.serving import context as contexts
from hf_hybrid_ssm.serving.fingerprint import architecture, weights_fingerprint
from tests.tiny_models import config_of, own_language_model

FAMILIES = ["longhorn + window and full attention", "bst mh s4", "lmu-isa", "spade s4 window"]
SHAPES = [(2, 6), (6, 2), (12,), (1, 2, 6)]


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
    decoder, found = model.get_decoder(), set()
    for tensor in tensors:
        decoder.register_buffer("extra", tensor)
        found.add(weights_fingerprint(model))
    assert len(found) == len(tensors)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight * 2)
    assert weights_fingerprint(other) == weights_fingerprint(model)  # the head reads states and makes none
