"""The BST family: a plain evaluation of the published layer, causality, sizes, final caches, retrieval, refusals."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from hf_hybrid_ssm import BstConfig, BstForCausalLM, BstForSequenceClassification
from hf_hybrid_ssm.layers.mixers.hippo import legs_dplr_basis
from hf_hybrid_ssm.layers.mixers.registry import build_mixer
from hf_hybrid_ssm.models.bst.block_states import block_grid
from hf_hybrid_ssm.ops.core.l2_normalise import scaled_queries
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS
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
        y = layer(x[None])[0]
        torch.testing.assert_close(y, plain_layer(layer, model.config, x), rtol=1e-9, atol=1e-10)
        y.square().sum().backward()
        assert all(parameter.grad.any() for parameter in layer.parameters() if parameter.requires_grad)


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


# -- beyond the equations: final caches, stable filters, initial scales, retrieval -----------------------------------

WINDOW = TINY["sliding_window"]
LENGTH = 3 * WINDOW + 5  # crosses three boundaries, ends inside a block
REMEMBERING = {"retrieval_k": 2, "retrieval_memory": 7, "retrieval_stride": 2}
FIELDS = {
    "block_recurrent": RECURRENT,
    "sh with memory": REMEMBERING,
    "mf with memory": REMEMBERING | {"context_variant": "mf", "retrieval_memory": 4},
}


@pytest.mark.parametrize(("variant", "ssm"), [*KINDS, *((name, None) for name in FIELDS)])
def test_steps_and_pieces_equal_the_whole_with_its_final_cache(variant, ssm):
    model = build(**FIELDS.get(variant, {"context_variant": variant, "ssm_type": ssm})).double()
    ids = inv.random_ids(model, 2, LENGTH, 0)
    full = DynamicCache(config=model.config)
    whole = model(ids, past_key_values=full, use_cache=True).logits
    for sizes in ([1] * LENGTH, [1, WINDOW - 1, WINDOW, WINDOW + 1, LENGTH - 3 * WINDOW - 1]):
        cache, found = DynamicCache(config=model.config), []
        for piece in ids.split(sizes, 1):
            found.append(model(piece, past_key_values=cache, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-10, atol=1e-10)
        for layer, expected in zip(cache.layers, full.layers):
            for name, state in layer.states.items():
                torch.testing.assert_close(state, expected.states[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("ssm", ["s4d", "s4"])
def test_perturbed_filters_stay_stable(ssm):
    torch.manual_seed(0)
    mixer = build_mixer(ssm, 4, state_size=16)
    for parameter in mixer.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    matrices = mixer.dynamics(torch.float64)[0][0]
    if ssm == "s4":
        assert torch.linalg.eigvals(matrices).abs().max() < 1
    else:
        assert torch.view_as_complex(matrices).abs().max() < 1
    impulse = F.pad(torch.ones(1, 1, 4), (0, 0, 0, 2**16 - 1))
    y = mixer(impulse)[0]
    assert y.isfinite().all() and y[0, -100:].abs().max() <= y.abs().max()


def test_initial_scales():
    torch.manual_seed(0)
    config = BstConfig(**TINY | {"hidden_size": 256, "vocab_size": 4000, "initializer_range": 1.0})
    model = BstForCausalLM(BstConfig(**config.to_dict() | {"context_variant": "mf"})).eval()
    ids = inv.random_ids(model, 2, 60, 0)
    logits = model(ids).logits
    input_removed = logits.scatter(2, ids.unsqueeze(-1), 0.0)  # its own embedding is the input's, tied to the head
    assert 0.7 < input_removed.std().item() < 1.4


def _context_of_blocks(attention, x):
    """Keys and values (B, J, S, H, e) of the blocks of new rows, which the next forward uses as they are here."""
    context = attention.context
    grid = block_grid(x, WINDOW, {})
    keys, values, after = context.by_block(x, grid, {}, PLAIN_ROWS)
    context.by_block = lambda *arguments: (keys, values, after)
    return keys, values


def test_retrieval_equals_a_softmax_over_the_best_old_states():
    """One row, token by token: its block's states up to itself, and the best k of the last M of finished blocks."""
    model = build(**REMEMBERING).double()
    attention, x = model.model.layers[0].attention, torch.randn(1, LENGTH, 16, dtype=torch.float64)
    queries = attention.context_q_proj(x).unflatten(2, (2, -1))
    keys, values = (part[0].flatten(0, 1) for part in _context_of_blocks(attention, x))  # token by token
    found, _ = attention.context(queries, x, {}, PLAIN_ROWS, head_scale=attention.context_scale)
    queries = scaled_queries(queries, attention.context_scale)[0]
    for t in range(LENGTH):
        start = t - t % WINDOW
        old = [position for position in range(start) if position % 2 == 1][-7:]
        own = list(range(start, t + 1))
        for head in range(2):
            score = keys[:, head] @ queries[t, head]
            old_best = sorted(old, key=lambda position: -score[position])[:2]
            places = torch.tensor(own + old_best)
            expected = score[places].softmax(0) @ values[places, head]
            torch.testing.assert_close(found[0, t, head], expected, rtol=1e-10, atol=1e-10)


def test_no_gradient_through_the_memory():
    model = build(**REMEMBERING | {"retrieval_stride": 1}).double()
    attention = model.model.layers[0].attention
    x = torch.randn(1, 2 * WINDOW, 16, dtype=torch.float64, requires_grad=True)
    _, values = _context_of_blocks(attention, x)
    found, _ = attention.context(
        attention.context_q_proj(x).unflatten(2, (2, -1)), x, {}, PLAIN_ROWS, head_scale=attention.context_scale
    )
    (gradient,) = torch.autograd.grad(found[0, WINDOW:].sum(), values)
    assert gradient[0, 0].abs().sum() == 0 and gradient[0, 1].abs().sum() > 0
