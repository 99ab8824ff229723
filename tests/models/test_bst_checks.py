"""Block-State Transformers beyond the equations that test_bst.py evaluates: steps and final caches in float64, stable
filters, the shift of "mf", alignment of blocks, initial scales, retrieval."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from hf_hybrid_ssm import BstConfig, BstForCausalLM
from hf_hybrid_ssm.layers.mixers.registry import build_mixer
from hf_hybrid_ssm.models.bst.block_grid import block_grid, scaled_queries
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS
from tests.models.invariances import random_ids
from tests.models.test_bst import KINDS, RECURRENT, TINY, build

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
    ids = random_ids(model, 2, LENGTH, 0)
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
    ids = random_ids(model, 2, 60, 0)
    logits = model(ids).logits
    input_removed = logits.scatter(2, ids.unsqueeze(-1), 0.0)  # its own embedding is the input's, tied to the head
    assert 0.7 < input_removed.std().item() < 1.4
    context = model.model.layers[0].attention.context
    assert 0.09 < context.initial_context.std() < 0.11 and 0.9 < context.context_ids.std() < 1.1
    assert all(torch.equal(a, torch.ones_like(a)) for n, a in model.named_parameters() if n.endswith("scale"))


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
