"""Sinks of window attention in both families that have them; tests/models/test_bst.py has BST's equations."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_hybrid_ssm.layers.attention_sink import AttentionSink
from hf_hybrid_ssm.models.longhorn import attention_longhorn
from hf_hybrid_ssm.models.packing import packed_rows, resolve_packing
from hf_hybrid_ssm.models.rotary import with_sink_rotation
from hf_hybrid_ssm.training.optim import parameter_groups
from tests.tiny_models import BST, HYBRID, LONGHORN, ROTARY, TOKENS

WINDOW = 6
LIKE_LLAMA = {**BST, **ROTARY, "zero_kv_sink": False, "attend_self": True, "ssm_layers": [], "block_types": None}
MODELS = {
    "longhorn": ("longhorn", {**LONGHORN, **HYBRID, "num_hidden_layers": 2, "block_types": ["sliding_attention"] * 2}),
    "bst rotary": ("bst", {**LIKE_LLAMA, "num_hidden_layers": 2}),
    "bst": ("bst", {**BST, "zero_kv_sink": False, "num_hidden_layers": 2, "ssm_layers": [0]}),
}
SCALED = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
every_model = pytest.mark.parametrize("name", MODELS)


def model_of(name, kind, **fields):
    """The same weights for every kind of sink."""
    model_type, own = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**TOKENS, **own, "attention_sink": None, **fields})
    )
    model = model.eval()
    if kind is None:
        return model
    with_sink = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**TOKENS, **own, **fields, "attention_sink": kind})
    )
    with_sink.load_state_dict(model.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(1)
    for module in with_sink.modules():
        for parameter in module.parameters() if isinstance(module, AttentionSink) else ():
            parameter.data.normal_(generator=generator)
    return with_sink.eval()


def ids_of(rows, length):
    return torch.randint(3, TOKENS["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(2))


@every_model
def test_a_constant_sink_changes_nothing_within_the_window(name):
    """And something for every token after it, counted in each document and without padding."""
    plain, model = model_of(name, None), model_of(name, "constant")
    reach = WINDOW if "bst" in name else WINDOW - 1  # a Longhorn window counts the token itself
    ids = ids_of(2, 24)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    documents = (torch.arange(24) >= 10).long().expand(2, -1)
    for rank, options in (
        (torch.arange(24).expand(2, -1), {}),
        (torch.arange(24).expand(2, -1) - torch.tensor([[0], [5]]), {"attention_mask": mask}),
        (torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1), {"seq_idx": documents}),
    ):
        changed = (model(ids, **options).logits != plain(ids, **options).logits).any(-1)
        assert torch.equal(changed & (rank >= 0), rank > reach)


@every_model
def test_a_scalar_sink_changes_every_token(name):
    ids = ids_of(1, 12)
    changed = (model_of(name, "scalar")(ids).logits != model_of(name, None)(ids).logits).any(-1)
    assert changed[0, 1:].all()


def turned(x, inverse_frequencies, distance, scale):
    """x (..., e) at a position, by complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.polar(torch.full_like(inverse_frequencies, scale), inverse_frequencies * distance)
    z = torch.complex(x[..., :half], x[..., half:]) * angle
    return torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize("kind", ["constant", "scalar"])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 100.0}, SCALED], ids=["default", "scaled"])
def test_longhorns_windows_equal_the_equation(kind, rope):
    """Token by token in float64, two documents in a row; scaled positions multiply queries and keys too."""
    model = model_of("longhorn", kind, rope_parameters=rope).double()
    attention, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    x = torch.randn(1, 20, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(12), torch.arange(8)])
    angles, of_sink = with_sink_rotation(rotary, x, positions[None], WINDOW if kind == "constant" else None)
    rows = resolve_packing((1, 20), (0, {}), seq_idx=(torch.arange(20) >= 12).long()[None])
    y, _ = attention(x, rows, angles, sink_rotation=of_sink)
    frequencies, scale = rotary.inv_freq.double(), float(rotary.attention_scaling)
    assert (scale != 1.0) == (rope is SCALED)
    q, k, v = (layer(x[0]).view(20, -1, 6) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    outputs = []
    for t in range(20):
        rank, logits, values = int(positions[t]), [], []
        query = turned(q[t], frequencies, rank, scale)
        for j in range(max(t - rank, t - WINDOW + 1), t + 1):
            logits.append((query * turned(k[j], frequencies, int(positions[j]), scale)).sum(-1) * 6**-0.5)
            values.append(v[j])
        if kind == "scalar":
            logits.append(attention.sink.logits)
            values.append(torch.zeros_like(v[0]))
        elif rank >= WINDOW:
            key, value = (part.repeat_interleave(2, 0) for part in (attention.sink.key, attention.sink.value))
            logits.append((turned(q[t], frequencies, WINDOW, scale) * key * scale).sum(-1) * 6**-0.5)
            values.append(value)
        outputs.append((torch.stack(logits).softmax(0).unsqueeze(-1) * torch.stack(values)).sum(0).flatten())
    want = attention.o_proj(torch.stack(outputs))
    torch.testing.assert_close(y[0], want, rtol=1e-5, atol=1e-6)  # angles are float32


@every_model
@pytest.mark.parametrize("kind", ["constant", "scalar"])
def test_bfloat16_is_near_float64(name, kind):
    """Logits, and the gradients of the sink."""
    ids, found = ids_of(2, 20), []
    for dtype in (torch.float64, torch.bfloat16):
        model = model_of(name, kind).to(dtype)
        model(ids, labels=ids).loss.backward()
        gradients = [parameter.grad for path, parameter in model.named_parameters() if ".sink." in path]
        assert gradients and all(gradient.any() for gradient in gradients)
        found.append(torch.cat([x.double().flatten() / x.abs().max() for x in (model(ids).logits, *gradients)]))
    assert (found[0] - found[1]).abs().max() < 0.05


@every_model
def test_sinks_are_not_decayed(name):
    model = model_of(name, "constant")
    of_sink = {id(parameter) for path, parameter in model.named_parameters() if ".sink." in path}
    decays = {
        id(parameter): group["weight_decay"] for group in parameter_groups(model, 0.1) for parameter in group["params"]
    }
    assert len(of_sink) == 4 and {decays[key] for key in of_sink} == {0.0}


def test_no_kernel_without_sinks_takes_over(monkeypatch):
    """FlashAttention, asked for, would leave the sink out."""
    model, ids = model_of("longhorn", "constant"), ids_of(1, 20)
    want = model(ids).logits
    monkeypatch.setattr(attention_longhorn, "is_flash_attention_requested", lambda config: True)
    torch.testing.assert_close(model(ids).logits, want)


@pytest.mark.parametrize("name", ["longhorn", "bst rotary"])
def test_a_rotary_sink_asks_for_its_rotation(name):
    model = model_of(name, "constant")
    x, rows = torch.randn(1, 20, 24), packed_rows(length=20)
    angles = model.model.rotary_emb(x, torch.arange(20)[None])
    with pytest.raises(ValueError, match="sink_rotation=None"):
        model.model.layers[0](x, rows, position_embeddings=angles)


@every_model
def test_a_token_computes_no_sink_that_it_does_not_see(name):
    """Its rows are looked at one by one: those within the window, those beyond it, and both at once."""
    model = model_of(name, "constant")
    module = next(module for module in model.modules() if isinstance(module, AttentionSink))
    size = module.key.shape[1]
    heads, left = model.config.num_attention_heads, 4
    queries = torch.randn(2, 1, heads, size, generator=torch.Generator().manual_seed(0))
    rotation = (torch.rand(size), torch.rand(size))
    options = {"left": left, "scale": 0.5, "is_rotary": True, "rotation": rotation}
    for ranks in ([4, 0], [5, 9], [4, 5]):
        rank = torch.tensor(ranks).unsqueeze(1)
        want = module(queries, rank, **options)["sink_logits"]  # with gradients, where values are not looked at
        with torch.no_grad():
            found = module(queries, rank, **options)
        if max(ranks) <= left:
            assert found == {"sink_logits": None, "sink_values": None} and want.isneginf().all()
            continue
        torch.testing.assert_close(found["sink_logits"], want.detach(), rtol=1e-6, atol=1e-6)
        assert found["sink_values"] is module.value
    with torch.no_grad(), pytest.raises(ValueError, match="sink_rotation=None, but a constant sink is rotated"):
        module(queries, torch.zeros(2, 1, dtype=torch.long), **options | {"rotation": None})
