"""Every dropout rate of a configuration does something in training, and nothing else does."""

import pytest
import torch
from transformers import AutoConfig

from tests.tiny_models import EVERY, batch_of, classes_of, config_of

# where a rate acts: variant, class, field
ATTENTION = [
    ("longhorn + full attention", "LonghornForCausalLM"),
    ("longhorn + window attention", "LonghornForCausalLM"),
    ("bst sh s4d", "BstForCausalLM"),
    ("lmu-isa + global attention", "LmuIsaForCausalLM"),
    ("lmu-isa + window attention", "LmuIsaForCausalLM"),
    ("spade s4 window", "SpadeForCausalLM"),
    ("spade hyena full", "SpadeForCausalLM"),
    ("encoder-decoder", "SpadeForConditionalGeneration"),
    ("student: groups", "HybridStudentForCausalLM"),
]
RATES = [(*where, "attention_dropout") for where in ATTENTION]
RATES += [("bst sh s4d", "BstForCausalLM", field) for field in ("dropout", "final_dropout")]
RATES += [(f"lmu-isa{more}", "LmuIsaForCausalLM", "hidden_dropout") for more in ("", " + global attention")]
SPADE = ("dropout", "activation_dropout", "embedding_dropout")
RATES += [("spade s4 window", "SpadeForCausalLM", field) for field in SPADE]
RATES += [("encoder-decoder", "SpadeForConditionalGeneration", field) for field in SPADE]
RATES += [("spade adaptive", "SpadeForMaskedLM", "adaptive_dropout")]
RATES += [("spade s4 window", "SpadeForSequenceClassification", "classifier_dropout")]
RATES += [("encoder-decoder", "SpadeSeq2SeqForSequenceClassification", "classifier_dropout")]
WINDOWS = {"layer_types": ["window_attention", "longhorn", "longhorn"], "sliding_window": 6}


def rates_of(model_type: str) -> list[str]:
    return [field for field in AutoConfig.for_model(model_type).to_dict() if field.endswith("dropout")]


def outputs_of(variant: str, class_name: str, **rates: float) -> list[torch.Tensor]:
    """Of a model in training with all other rates 0: its logits; of an encoder-decoder, first the encoder's states."""
    name = variant.replace("window attention", "full attention") if variant not in EVERY else variant
    off = dict.fromkeys(rates_of(EVERY[name][0]), 0.0) | {"initializer_range": 0.3}  # every branch is heard
    torch.manual_seed(0)
    model = classes_of(name)[class_name](config_of(name, **off | (WINDOWS if name != variant else {}) | rates)).train()
    ids = batch_of(name)["input_ids"]
    with torch.no_grad():
        if class_name != "SpadeForConditionalGeneration":
            return [model(ids).logits]
        states = model.get_encoder()(ids).last_hidden_state
        held = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
        return [states, model(encoder_outputs=(held,), decoder_input_ids=ids[:, :6]).logits]


@pytest.mark.parametrize(("variant", "class_name", "field"), RATES)
def test_a_rate_changes_what_training_computes(variant, class_name, field):
    without, again, dropped = (outputs_of(variant, class_name, **{field: rate}) for rate in (0.0, 0.0, 0.5))
    for before, same, after in zip(without, again, dropped):
        assert torch.equal(before, same)
        assert not torch.allclose(before, after, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", sorted({model_type for model_type, _ in EVERY.values()}))
def test_every_rate_is_tested(model_type):
    tested = {field for variant, _, field in RATES if EVERY.get(variant, ("longhorn",))[0] == model_type}
    assert tested == set(rates_of(model_type))
