"""The layers with plain arguments: each way to read a text gives the same, and the models are made of them."""

import copy
import importlib

import pytest
import torch

from hf_hybrid_ssm import layers, ops
from hf_hybrid_ssm.layers import S4, S4D, S5, BlockState, Hyena, Lmu, Longhorn
from tests.tiny_models import compiles, language_model

D, LENGTH = 16, 20
BLOCK = {"num_attention_heads": 2, "head_dim": 8, "intermediate_size": 32, "sliding_window": 6, "ssm_state_size": 4}
CASES = {
    "Longhorn": lambda: Longhorn(D, state_size=4),
    "Lmu": lambda: Lmu(10, 3, 12.0),
    "BlockState": lambda: BlockState(D, **BLOCK),
    "BlockState mf": lambda: BlockState(D, **BLOCK, context_variant="mf", num_context_states=3),
    "S4": lambda: S4(D),
    "S4D": lambda: S4D(D),
    "S5": lambda: S5(D, state_size=8),
    "Hyena": lambda: Hyena(D),
    "EMA": lambda: layers.EMA(D),
    "LSTM": lambda: layers.LSTM(D),
}


def made(name):
    torch.manual_seed(0)
    return CASES[name]()


def test_every_name_has_a_case():
    assert {name.partition(" ")[0] for name in CASES} == set(layers.__all__)


@pytest.mark.parametrize("name", CASES)
def test_every_way_to_read_gives_the_same(name):
    layer = made(name).double().eval()
    x = torch.randn(2, LENGTH, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = layer(x)
        y, state = layer(x[:, :13], return_state=True)
        pieces = [y]
        for index in range(13, LENGTH):
            y, state = layer(x[:, index : index + 1], state, return_state=True)
            pieces.append(y)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-12)
        seq_idx = torch.tensor([[0] * 8 + [1] * (LENGTH - 8)] * 2)
        apart = torch.cat([layer(x[:, :8]), layer(x[:, 8:])], 1)
        torch.testing.assert_close(layer(x, seq_idx=seq_idx), apart, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(apart[:, 8:], whole[:, 8:])
    assert all(part.shape[0] == 2 for part in state.values())
    with pytest.raises(ValueError, match="x must have shape"):
        layer(x[0])


@pytest.mark.parametrize("name", CASES)
def test_gradients_reach_every_parameter(name):
    layer = made(name)
    x = torch.randn(2, LENGTH, D, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad.abs().sum() > 0
    assert [name for name, value in layer.named_parameters() if value.requires_grad and value.grad is None] == []


def test_recurrence_parameters_stay_in_float32():
    layer = Longhorn(D).to(torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in layer.named_parameters()}
    assert dtypes["D"] == dtypes["dt_bias"] == torch.float32 and dtypes["in_proj.weight"] == torch.bfloat16


@pytest.mark.parametrize("name", ["Longhorn", "BlockState"])
def test_the_models_are_made_of_them(name):
    """Weights by the same names, and the same output."""
    model = language_model({"Longhorn": "longhorn", "BlockState": "bst sh s4d"}[name])
    theirs = model.model.layers[0].mixer if name == "Longhorn" else model.model.layers[0]
    fields = {field: getattr(model.config, field) for field in _fields(name)}
    layer = getattr(layers, name)(model.config.hidden_size, **fields).eval()
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(2, LENGTH, model.config.hidden_size)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), theirs(x))


def _fields(name):
    if name == "Longhorn":
        return ("state_size",)
    return (
        *("num_attention_heads", "head_dim", "intermediate_size", "sliding_window", "ssm_state_size", "ssm_type"),
        *("num_context_states", "relative_attention_num_buckets", "relative_attention_max_distance"),
    )


@compiles
def test_compiled():
    layer = made("Longhorn").eval()
    x = torch.randn(2, LENGTH, D)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_copies_are_apart():
    layer = made("Longhorn")
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.D.zero_()
    x = torch.randn(1, 4, D)
    assert not torch.equal(layer(x), other(x))


def test_ops_by_name():
    """The function, also once something has imported the module of that name."""
    for name in ops.__all__:
        one = getattr(ops, name)
        assert one.__name__ == name and getattr(importlib.import_module(one.__module__), name) is one
        assert callable(getattr(ops, name))
    assert ops.longhorn_scan is importlib.import_module("hf_hybrid_ssm.ops.longhorn_scan").longhorn_scan
