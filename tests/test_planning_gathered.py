"""What FSDP2 gathers: one layer's weights and gradients, and those outside of layers, counted here by names."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_hybrid_ssm.planning import Setup
from hf_hybrid_ssm.planning.training_step import weights

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("options", "bytes_of_a_number"),
    [({}, 4), ({"mixed_precision": True}, 2), ({"dtype": "bfloat16"}, 2)],
    ids=str,
)
def test_weights_and_gradients_of_a_layer_are_gathered(options, bytes_of_a_number):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", **SIZES))
    layers = [0] * SIZES["num_hidden_layers"]
    outside = 0
    for name, parameter in model.named_parameters():
        if "layers." in name:
            layers[int(name.partition("layers.")[2].split(".")[0])] += parameter.numel()
        else:
            outside += parameter.numel()
    assert outside >= 50 * 16 and min(layers) > 0
    model.to(getattr(torch, options.get("dtype", "float32")))
    found = weights(model, Setup(gpus=2, sharding="fsdp2", **options))
    of_weights = of_gradients = bytes_of_a_number * (max(layers) + outside)
    assert found["gathered"] == of_weights + of_gradients
    assert weights(model, Setup(gpus=1, sharding="fsdp2", **options))["gathered"] == 0
