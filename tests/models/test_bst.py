"""The BST family: a plain evaluation of the published layer, causality, sizes, invariances, refusals."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm import BstConfig, BstForCausalLM, BstForSequenceClassification
from hf_hybrid_ssm.layers.mixers.hippo import legs_dplr_basis
from tests.memory import in_own_memory
from tests.models import invariances as inv

TINY = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "sliding_window": 6, "ssm_layers": [0, 2], "num_context_states": 3,
    "ssm_state_size": 4, "filter_length": 16,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
    "initializer_range": 0.5, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
KINDS = [(variant, ssm) for variant in ("sh", "mh", "mf") for ssm in ("s4d", "s4", "unstructured", "s5")]
OPTIONS = {
    "self-and-no-sink": {"attend_self": True, "zero_kv_sink": False, "qk_norm": False},
    "no sink": {"zero_kv_sink": False},
}


def build(model_class=BstForCausalLM, **fields):
    torch.manual_seed(0)
    model = model_class(BstConfig(**TINY | fields)).eval()
    for name, parameter in model.named_parameters():  # away from the smooth initial point, so that a mistake shows
        if name.endswith("scale"):
            parameter.data.uniform_(-2.0, -1.0)  # its absolute value counts
        elif name.endswith("bias") or ("_norm." in name and "attention." in name):
            parameter.data.add_(torch.rand_like(parameter))
    return model


RECURRENT = {
    "ssm_layers": None,
    "layer_types": ["block_recurrent", "window_attention", "block_recurrent"],
    "recurrent_num_states": 3,
}


def l2(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def context_of_token(context, y, t, config):
    """Keys and values (slots, H, e) that token t attends to; y is (L, [F,] d)."""
    heads, window, start = config.num_attention_heads, config.sliding_window, t - t % config.sliding_window
    if config.context_variant == "mf":
        c = context.initial_context if start == 0 else y[start - 1]
        c = context.norm(c) + context.context_ids
    else:
        c = context.norm(y[start : t + 1])
    if config.context_variant == "mh":
        keys = torch.einsum("shd,hde->she", c, context.k_proj.weight)
        values = torch.einsum("shd,hde->she", c, context.v_proj.weight)
    else:
        keys, values = (part(c).view(c.shape[0], heads, config.head_dim) for part in (context.k_proj, context.v_proj))
    assert keys.shape[0] <= window
    return l2(keys) if config.qk_norm else keys, values


def plain_layer(layer, config, x):
    """Sections 3 and 5 for one row x (L, d) of float64, token by token."""
    attention, heads, window = layer.attention, config.num_attention_heads, config.sliding_window
    z, length, out = layer.attention_norm(x), x.shape[0], []
    q, k, v = (part(z).view(length, -1, 8) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    bias = attention.relative_bias(window)
    scale = attention.scale.abs() if config.qk_norm else torch.full((heads,), config.head_dim**-0.5, dtype=x.dtype)
    q, k = (l2(q), l2(k)) if config.qk_norm else (q, k)
    context, y = getattr(attention, "context", None), None
    if context is not None:
        y = context.ssm((x if context.input_norm is None else context.input_norm(x))[None])[0][0]
        queries = attention.context_q_proj(z).view(length, heads, -1)
        queries = l2(queries) if config.qk_norm else queries
        context_scale = attention.context_scale.abs() if config.qk_norm else scale
    for t in range(length):
        logits, values = [], []
        for distance in range(0 if config.attend_self else 1, window + 1):
            b = bias[:, min(distance, bias.shape[1] - 1)]
            if t - distance >= 0:
                product = (q[t] * k[t - distance]).sum(-1)
                logits.append(scale * (product + b) if config.qk_norm else scale * product + b)
                values.append(v[t - distance])
            elif config.zero_kv_sink:
                logits.append(scale * b if config.qk_norm else b)
                values.append(torch.zeros_like(v[0]))
        parts = [torch.zeros_like(v[0])]
        if logits:
            parts = [(torch.stack(logits).softmax(0).unsqueeze(-1) * torch.stack(values)).sum(0)]
        if context is not None:
            keys, context_values = context_of_token(context, y, t, config)
            scores = context_scale * (queries[t] * keys).sum(-1)
            parts.append((scores.softmax(0).unsqueeze(-1) * context_values).sum(0))
        out.append(torch.cat([part.flatten() for part in parts]))
    x = x + attention.o_proj(torch.stack(out))
    y, mlp = layer.feed_forward_norm(x), layer.feed_forward
    return x + mlp.fc2(torch.relu(mlp.fc1(y)))


@pytest.mark.parametrize(("variant", "ssm"), KINDS)
def test_layers_equal_the_published_equations(variant, ssm):
    model = build(context_variant=variant, ssm_type=ssm).double()
    x = torch.randn(20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for layer in model.model.layers:
        torch.testing.assert_close(layer(x[None])[0], plain_layer(layer, model.config, x), rtol=1e-9, atol=1e-10)


def recurrent_layer(layer, config, x):
    """A Block-Recurrent layer with a fixed gate and no feed-forward on its states: one row (L, d), block by block."""
    attention, cell, heads, window = layer.attention, layer.attention.recurrent, config.num_attention_heads, 6
    z, length = layer.attention_norm(x), x.shape[0]

    def in_heads(part):
        return part.view(part.shape[0], heads, -1)

    def attend(q, k, v, scale):
        weights = (torch.einsum("qhe,khe->hqk", l2(q), k) * scale.abs()[:, None, None]).softmax(-1)
        return torch.einsum("hqk,khe->qhe", weights, v).flatten(1)

    k, v = l2(in_heads(attention.k_proj(z))), in_heads(attention.v_proj(z))
    q, crossing = in_heads(attention.q_proj(z)), in_heads(attention.context_q_proj(z))
    bias, state, found = attention.relative_bias(window), cell.initial_state, []
    zeros = torch.zeros(window, *k.shape[1:], dtype=x.dtype)
    padded_k, padded_v = torch.cat([zeros, k]), torch.cat([zeros, v])  # token t lies at t + W
    for start in range(0, length, window):
        r = cell.norm(state) + cell.state_ids
        state_k, state_v = l2(in_heads(cell.k_proj(r))), in_heads(cell.v_proj(r))
        block = slice(start, min(start + window, length))
        crossed = attend(crossing[block], state_k, state_v, attention.context_scale)
        for t in range(block.start, block.stop):
            near = slice(t, t + window)  # the W tokens before
            score = torch.einsum("he,khe->hk", l2(q[t]), padded_k[near])
            distance = torch.arange(window, 0, -1).clamp(max=bias.shape[1] - 1)
            weights = (attention.scale.abs()[:, None] * (score + bias[:, distance])).softmax(-1)
            itself = torch.einsum("hk,khe->he", weights, padded_v[near]).flatten()
            found.append(torch.cat([itself, crossed[t - start]]))
        tokens = slice(start, start + 2 * window)  # the block before and this one
        both = (
            attend(in_heads(cell.q_proj(r)), state_k, state_v, cell.scale),
            attend(in_heads(cell.token_q_proj(r)), padded_k[tokens], padded_v[tokens], cell.token_scale),
        )
        gate = cell.gate.sigmoid()
        state = gate * state + (1 - gate) * cell.o_proj(torch.cat(both, -1))
    x = x + attention.o_proj(torch.stack(found))
    return x + layer.feed_forward.fc2(torch.relu(layer.feed_forward.fc1(layer.feed_forward_norm(x))))


def test_recurrent_layers_equal_the_loop_over_blocks():
    model = build(**RECURRENT).double()
    x = torch.randn(21, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for layer in (model.model.layers[0], model.model.layers[2]):
        torch.testing.assert_close(layer(x[None])[0], recurrent_layer(layer, model.config, x), rtol=1e-9, atol=1e-10)


def test_recurrent_layers_depend_on_the_past_alone():
    model = build(**RECURRENT).double()
    for t in (0, 5, 6, 14, 19):
        x = torch.randn(1, 20, 16, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(model.model.layers[0](x)[0, t].sum(), x)
        depends, position, boundary = gradient[0].abs().sum(-1) > 0, torch.arange(20), t - t % 6
        assert torch.equal(depends, (position < boundary) | ((position <= t) & (position >= t - 6)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("variant", ["sh", "mh", "mf"])
def test_options_equal_the_equations_and_decode(options, variant):
    model = build(context_variant=variant, **options).double()
    x = torch.randn(20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer = model.model.layers[0]
    torch.testing.assert_close(layer(x[None])[0], plain_layer(layer, model.config, x), rtol=1e-9, atol=1e-9)
    inv.check_split(model, inv.random_ids(model, 2, 20, 0), list(range(1, 20)))


@pytest.mark.parametrize(("variant", "ssm"), [("sh", "s4d"), ("mh", "s4"), ("mf", "s4d"), ("mf", "unstructured")])
def test_what_a_token_depends_on(variant, ssm):
    """By gradient: nothing later, and for "mf" nothing of its own block but the window."""
    model = build(context_variant=variant, ssm_type=ssm, zero_kv_sink=True).double()
    layer, window = model.model.layers[0], 6
    for t in (0, 5, 6, 11, 19):
        x = torch.randn(1, 20, 16, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(layer(x)[0, t].sum(), x)
        size = gradient[0].abs().sum(-1)
        depends = size > 1e-12 * size.max()  # Fourier transforms leave rounding
        position = torch.arange(20)
        near = (position <= t) & (position >= t - window)
        if variant != "mf":
            expected = position <= t
        else:
            boundary = t - t % window
            reach = 16 if ssm == "unstructured" else 20
            expected = near | ((position < boundary) & (position >= boundary - reach))
        assert torch.equal(depends, expected), (t, depends, expected)


@pytest.mark.parametrize(
    ("preset", "fields", "count"),
    [
        ("200m-slide", {}, 183_922_784),
        ("200m-block-recurrent", {}, 193_362_040),
        ("80m", {}, 98_334_328),
        ("80m", {"context_variant": "mh"}, 98_871_928),
        ("80m", {"context_variant": "mf"}, 100_813_432),
        ("80m", {"ssm_layers": []}, 91_962_976),
        ("80m", {"context_variant": "mf", "ssm_type": "unstructured"}, 101_582_392),
        ("200m", {}, 196_665_464),
        ("200m", {"context_variant": "mf"}, 201_623_672),
        ("200m", {"ssm_type": "s4"}, 196_714_616),
        ("200m", {"ssm_num_dynamics": 1}, 196_567_256),
        ("400m", {}, 368_688_384),
        ("400m", {"context_variant": "mf", "ssm_type": "s4"}, 377_396_480),
        ("1.3b", {}, 1_374_804_448),
        ("1.3b", {"context_variant": "mh"}, 1_384_327_648),
    ],
)
def test_parameter_counts(preset, fields, count):
    with torch.device("meta"):
        model = BstForCausalLM(BstConfig.preset(preset, **fields))
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("variant", "ssm"), KINDS)
def test_round_trip_is_bit_equal(variant, ssm, tmp_path):
    model = build(context_variant=variant, ssm_type=ssm)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    ids = inv.random_ids(model, 2, 15, 0)
    assert torch.equal(model(ids).logits, in_own_memory(loaded)(ids).logits)


def test_filters_stay_float32_in_bfloat16(tmp_path):
    build().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ssm = model.model.layers[0].attention.context.ssm
    assert all(p.dtype == torch.float32 for p in ssm.parameters())
    assert model(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def test_cache_does_not_grow():
    model = build()
    sizes = []
    for length in (7, 300):
        layers = model(inv.random_ids(model, 1, length, 0), use_cache=True).past_key_values.layers
        sizes.append([tuple(t.shape) for layer in layers for t in layer.states.values()])
    assert sizes[0] == sizes[1]


def test_loss_without_logits_equals_loss_with():
    model = build(dropout=0.0, attention_dropout=0.0, final_dropout=0.0).train()
    ids = inv.random_ids(model, 2, 20, 0)
    want = model(ids, labels=ids)
    model.config.use_linear_cross_entropy = True
    got = model(ids, labels=ids)
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss)


def test_classifier_pools_the_last_real_token():
    model = build(BstForSequenceClassification, num_labels=3)
    ids = inv.random_ids(model, 1, 9, 0)
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], 1)
    mask = (torch.arange(13) < 9).long()[None]
    torch.testing.assert_close(model(padded, attention_mask=mask).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


TWO_SIDED = {"bidirectional": True, "num_labels": 3, "relative_attention_num_buckets": 8}


@pytest.mark.parametrize(("variant", "ssm"), [("sh", "s4d"), ("mh", "s4"), ("sh", "unstructured"), ("sh", "s5")])
def test_bidirectional_classifier(variant, ssm):
    """Every token sees all others; padding on either side and other rows change nothing."""
    model = build(BstForSequenceClassification, context_variant=variant, ssm_type=ssm, **TWO_SIDED).double()
    x = torch.randn(1, 20, 16, dtype=torch.float64, requires_grad=True)
    layer = model.model.layers[0]
    for t in (0, 5, 6, 19):
        (gradient,) = torch.autograd.grad(layer(x)[0, t].sum(), x)
        reach = (torch.arange(20) - t).abs() <= 16 + 5 if ssm == "unstructured" else torch.ones(20, dtype=torch.bool)
        assert ((gradient[0].abs().sum(-1) > 0) <= reach).all() and (gradient[0, [0, 19]].abs().sum() > 0)
    rows = [inv.random_ids(model, 1, n, n) for n in (20, 13)]
    for side in ("left", "right"):
        ids, mask = inv.pad_rows(rows, 0, side)
        logits = model(ids, attention_mask=mask).logits
        for row, expected in zip(logits, rows):
            torch.testing.assert_close(row, model(expected).logits[0], rtol=1e-9, atol=1e-9)
    hidden = model.model(rows[0], use_cache=True)
    assert hidden.past_key_values is None


def test_bidirectional_is_not_a_language_model():
    with pytest.raises(ValueError, match="must not see the future"):
        build(**TWO_SIDED)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"num_context_states": -3}, "num_context_states=-3"),
        ({"recurrent_num_states": 0}, "recurrent_num_states=0"),
        ({"ssm_layers": [3]}, r"ssm_layers=\[3\] must name different layers from 0 to 2"),
        ({"ssm_layers": [1, 1]}, "different layers"),
        ({"ssm_layers": None, "layer_types": ["window_attention"]}, "num_hidden_layers=3"),
        ({"ssm_layers": None, "layer_types": ["window_attention", "bst", "lstm"]}, "lstm"),
        ({"layer_types": ["window_attention"] * 3}, "contradicts layer_types"),
        ({"context_variant": "xh"}, "context_variant='xh'"),
        ({"ssm_type": "mamba"}, "ssm_type='mamba'"),
        ({"ssm_type": "s4", "ssm_discretization": "zoh"}, "does not exist for ssm_type='s4'"),
        ({"ssm_type": "s5", "ssm_discretization": "bilinear"}, "does not exist for ssm_type='s5', which has 'zoh'"),
        ({"ssm_type": "unstructured", "ssm_discretization": "zoh"}, "no continuous system"),
        ({"ssm_state_size": 5}, "must be even"),
        ({"relative_attention_max_distance": 3}, "relative_attention_max_distance=3"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"bidirectional": True, "context_variant": "mf"}, "bidirectional=True has no meaning"),
        ({"bidirectional": True, "relative_attention_num_buckets": 6}, "multiple of 4"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        BstConfig(**TINY | fields)


def test_recurrent_layers_on_meta():
    """Shapes without memory, as planning and `device_map` ask for them."""
    recurrent = {"ssm_layers": None, "layer_types": ["block_recurrent"], "recurrent_num_states": 12}
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "sliding_window": 8,
    }
    with torch.device("meta"):
        model = BstForCausalLM(BstConfig(**sizes, intermediate_size=16, **recurrent))
        ids = torch.zeros(2, 20, dtype=torch.long)
    model(ids, labels=ids).loss.backward()
    assert model(ids, use_cache=True).logits.shape == (2, 20, 32)


# -- options that papers have and nothing here sets -------------------------------------------------------------------


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize("init", ["legs", "inv", "lin"])
def test_filters_start_and_are_discretised_as_s4d_says(init, discretization):
    """S4D-Lin: -1/2 + i pi n. S4D-Inv: -1/2 + i N / pi (N / (2 n + 1) - 1). S4D-LegS: HiPPO's normal part."""
    size = 8
    model = build(ssm_init=init, ssm_discretization=discretization, ssm_state_size=size)
    ssm = model.model.layers[0].attention.context.ssm.double()
    n = torch.arange(size // 2, dtype=torch.float64)
    frequencies = {
        "lin": torch.pi * n,
        "inv": size / torch.pi * (size / (2 * n + 1) - 1),
        "legs": legs_dplr_basis(size)[0].imag.abs(),
    }[init]
    eigenvalues = torch.complex(-ssm.A_log_real.exp(), ssm.A_imag)
    assert torch.allclose(eigenvalues.real, torch.tensor(-0.5, dtype=torch.float64), rtol=1e-6)
    for found in ssm.A_imag.abs():
        torch.testing.assert_close(found.sort().values, frequencies.sort().values, rtol=1e-6, atol=1e-6)
    z = ssm.log_dt[0, :, None].exp() * eigenvalues
    decay = torch.exp(z) if discretization == "zoh" else (1 + z / 2) / (1 - z / 2)
    transition, _ = ssm.dynamics(torch.float64)
    torch.testing.assert_close(transition.value[0].flatten(1), torch.view_as_real(decay).flatten(1))


@pytest.mark.parametrize("has_norm", [True, False])
def test_without_its_norm_the_state_space_model_reads_the_residual_stream(has_norm):
    block, x, seen = build(ssm_input_norm=has_norm).model.layers[0], torch.randn(1, 10, 16), []
    block.attention.context.ssm.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    block(x)
    norm = block.attention.context.input_norm
    expected = norm.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() if has_norm else x
    torch.testing.assert_close(seen[0], expected)
