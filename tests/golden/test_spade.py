"""SPADE's layers and its language model against those of its released code."""

import pytest
import torch

from hf_hybrid_ssm.hub.official.spade import convert, convert_state_dict
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig
from hf_hybrid_ssm.models.spade.modeling_spade import SpadeBlock, relative_bias
from tests.golden.values import FLOAT32, assert_near, golden, load

CASES = {
    "pre_concat": {"ssm_num_dynamics": 1},
    "pre_add": {"ssm_num_dynamics": 1, "ssm_merge": "add", "ssm_merge_weight": 0.3},
    "pre_stack": {"ssm_num_dynamics": 1, "ssm_merge": "stack"},
    "post_concat": {"ssm_num_dynamics": 2, "norm_position": "post", "hidden_act": "gelu"},
}


def build(case: str) -> tuple[list[SpadeBlock], torch.Tensor]:
    """A layer with and one without S4, and the bias by distance that the first one's table gives to both."""
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    config = SpadeConfig(num_hidden_layers=2, sliding_window=4, ssm_state_size=8, **sizes, **CASES[case])
    converted = convert_state_dict(golden("spade_layer", f"{case}.model"))
    blocks = []
    for index in range(2):
        block = SpadeBlock(config, index, is_causal=True).double().eval()
        start = f"model.layers.{index}."
        load(block, {key.removeprefix(start): value for key, value in converted.items() if key.startswith(start)})
        blocks.append(block)
    table = relative_bias(config, is_causal=True).double()
    load(table, {"weight": converted["model.relative_bias.weight"]})
    return blocks, table(config.sliding_window - 1).detach()


@pytest.mark.parametrize("case", CASES)
def test_layers(case):
    """Both layers and the gradient of the input. The converter stores C, found from C~ in float64, in float32."""
    wanted = golden("spade_layer", case)
    everything = golden("spade_layer")
    blocks, bias = build(case)
    x = everything["x"].transpose(0, 1).contiguous().requires_grad_()
    y = x
    for index, block in enumerate(blocks):
        y = block(y, bias)
        assert_near(y.transpose(0, 1), wanted[f"y{index}"], FLOAT32)
    (y.transpose(0, 1) * everything["weight"]).sum().backward()
    assert_near(x.grad.transpose(0, 1), wanted["grad_x"], FLOAT32)


def test_branches():
    """Before they are combined: S4 over the normalised row, also against the official recurrence, and attention to a
    token and the three before it."""
    wanted = golden("spade_layer", "pre_concat")
    (block, _), bias = build("pre_concat")
    mixing = block.mixing
    with torch.no_grad():
        z = block.mixing_norm(golden("spade_layer")["x"].transpose(0, 1))
        assert_near(mixing.ssm.kernel(z.shape[1], torch.float64), wanted["kernel"], FLOAT32)
        y = mixing.ssm(z)[0].transpose(0, 1)
        assert_near(y, wanted["s4"], FLOAT32)
        assert_near(y, wanted["step"], FLOAT32)
        local, _ = mixing.self_attn(z, {}, bias=bias)
    assert_near(local.transpose(0, 1), wanted["local"])


def test_language_model(tmp_path):
    """Every key that fairseq writes; adaptive input and softmax, S4, windowed attention; whole and in pieces."""
    wanted = golden("spade_model")
    torch.save({"model": golden("spade_model", "model")}, tmp_path / "checkpoint.pt")
    model = convert(tmp_path / "checkpoint.pt", sliding_window=4).eval().double()
    ids = wanted["input_ids"]
    pieces, cache = [], None
    with torch.no_grad():
        features = model.model(ids).last_hidden_state
        logits = model(ids).logits
        for piece in ids.split([6, 1, 1, 6], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            pieces.append(out.logits)
            cache = out.past_key_values
    assert_near(features, wanted["features"], FLOAT32)
    assert_near(logits, wanted["log_probs"], FLOAT32)
    assert_near(torch.cat(pieces, 1), wanted["log_probs"], FLOAT32)
