"""The LMU-ISA family: sizes of the paper, the block against its equations, invariances, constants, refusals."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm import LmuIsaConfig, LmuIsaForCausalLM
from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.ops.legendre_memory import transition
from tests import tiny_models as tiny
from tests.models import invariances as inv

TINY = tiny.TOKENS | tiny.LMU | {"sliding_window": 5}


def build(model_class=LmuIsaForCausalLM, **fields):
    torch.manual_seed(0)
    model = model_class(LmuIsaConfig(**TINY | fields)).eval()
    for parameter in model.parameters():  # away from the smooth initial point, so that a mistake shows
        parameter.data.mul_(1.5)
    return model


@pytest.mark.parametrize(
    ("preset", "non_embedding", "total"),
    [
        ("55k", 55_068, 2_467_404),
        ("100k", 100_192, 3_366_897),
        ("200k", 200_270, 4_773_657),
        ("300k", 300_116, 5_928_900),
        ("500k", 500_160, 7_737_168),
        ("1m", 1_000_056, 11_252_484),
        ("55k-global", 54_921, None),
        ("100k-global", 99_994, None),
        ("200k-global", 199_994, None),
        ("300k-global", 299_777, None),
        ("500k-global", 499_725, None),
        ("1m-global", 999_441, None),
        ("10m-rule", 9_999_822, 42_415_587),
        ("10m-deep", 10_000_896, 29_299_584),
        ("100m-rule", 99_998_758, 202_925_094),
        ("100m-deep", 100_002_452, 151_465_620),
        ("10m-rule-global", 10_001_757, None),
        ("10m-deep-global", 9_997_816, None),
        ("100m-rule-global", 100_004_902, None),
        ("100m-deep-global", 99_990_152, None),
    ],
)
def test_parameter_counts(preset, non_embedding, total):
    with torch.device("meta"):
        model = LmuIsaForCausalLM(LmuIsaConfig.preset(preset))
    count = sum(p.numel() for p in model.parameters())
    assert count - model.lm_head.weight.numel() == non_embedding
    assert total is None or count == total
    assert not any("transition" in name for name in model.state_dict())


def test_block_equals_its_equations():
    model = build().double()
    block, theta = model.model.layers[0], 12.0
    x = torch.randn(1, 15, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step, h = transition(10, theta), x[0]
    e0 = F.one_hot(torch.tensor(0), 10).double()
    h = h + block.pre_feed_forward(block.pre_norm(h))
    u, m, out = block.memory_norm(h), torch.zeros(10, 24, dtype=torch.float64), []
    for t in range(15):
        m = step @ m + (e0 - step @ e0)[:, None] * u[t]
        q, k, v = (F.gelu(w @ m + b[:, None]) for w, b in zip(block.memory.reduce_weight, block.memory.reduce_bias))
        mixed = (q @ k.T).softmax(-1) @ v
        out.append(block.memory.collapse_weight @ mixed + block.memory.collapse_bias)
    h = h + torch.stack(out)
    h = h + block.post_feed_forward(block.post_norm(h))
    torch.testing.assert_close(block(x)[0], h, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("form", ["fft", "recurrent"])
def test_forms_agree(form):
    model, other = build(), build()
    for layer in other.model.layers:
        layer.memory.form = form
    ids = inv.random_ids(model, 2, 40, 0)
    torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_nothing_rounds_the_memory(tmp_path):
    """Neither `.to`, nor loading in bfloat16, nor a start on the meta device touches the constants."""
    model = build()
    ids = inv.random_ids(model, 1, 40, 0)
    exact = model(ids, use_cache=True)
    model.save_pretrained(tmp_path)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for candidate in (low, build().to(torch.bfloat16)):
        out = candidate(ids, use_cache=True)
        assert out.logits.dtype == torch.bfloat16
        memory = out.past_key_values.layers[0].states["memory"]
        assert memory.dtype == torch.float32
        wanted = exact.past_key_values.layers[0].states["memory"]
        assert (memory - wanted).norm() / wanted.norm() < 2e-2
    again = build().half().float()
    memory = again(ids, use_cache=True).past_key_values.layers[0].states["memory"]
    assert (memory - exact.past_key_values.layers[0].states["memory"]).norm() < 0.05


def test_state_is_constant_in_length():
    model = build()
    sizes = []
    for length in (40, 400):
        layers = model(inv.random_ids(model, 1, length, 0), use_cache=True).past_key_values.layers
        sizes.append(sum(t.numel() for layer in layers for t in layer.states.values()))
    memory, recent, pending = 10 * 24, 32 * 24, 1  # the C kernel decodes from a memory that lags
    assert sizes[0] == sizes[1] == 2 * (memory + (0 if missing_compiler() else recent + pending))


def test_gradients_reach_everything():
    model = build(first_sublayer="global_attention").train()
    ids = inv.random_ids(model, 2, 70, 0)
    model(ids, labels=ids).loss.backward()
    # adding the same to all keys changes no softmax, and to all channels before a norm nothing: rounding alone is left
    idle = ("k_proj.bias", "collapse_bias")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.abs().sum() < 1e-6) == name.endswith(idle), name


@pytest.mark.parametrize(
    ("fields", "message"), [({"lmu_order": 20}, "exceeds lmu_theta"), ({"lmu_theta": 5000}, "8e-6")]
)
def test_doubtful_configurations_warn(fields, message):
    with pytest.warns(UserWarning, match=message):
        LmuIsaConfig(**TINY | fields)
