"""Students without their memory or their attention, and with an emptied memory."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_hybrid_ssm.upcycle import upcycle, without_part, zero_memory
from tests.upcycle.test_upcycle import SIZES, teacher_of, tokens

WINDOW = 6
STUDENTS = {
    "longhorn beside windows": {"keep": [1], "others_as": "hybrid_sliding", "sliding_window": WINDOW},
    "longhorn in the place of attention": {"keep": [1]},
    "bst": {"family": "bst", "ssm_layers": [0, 2], "sliding_window": WINDOW},
    "block-recurrent": {
        "family": "bst", "block_types": ["block_recurrent", *["sliding_attention"] * 3], "recurrent_num_states": 3,
        "sliding_window": WINDOW,
    },
}  # fmt: skip


def student_of(kind: str, **fields):
    """With weights that are away from their start, so that every part is heard."""
    student, _ = upcycle(teacher_of("llama", **fields), init="random", **STUDENTS[kind])
    torch.manual_seed(0)
    for parameter in student.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return student.double().eval()


def zeroed(student, part: str):
    """The student whose output projections have zeros where the part comes in."""
    student = copy.deepcopy(student)
    for layer in student.model.layers:
        if hasattr(layer, "attention"):
            weight, tokens = layer.attention.o_proj.weight.data, layer.attention.q_proj.out_features
            (weight[:, tokens:] if part == "memory" else weight[:, :tokens]).zero_()
            continue
        name, output = ("mixer", "out_proj") if part == "memory" else ("self_attn", "o_proj")
        if hasattr(layer, name):
            projection = getattr(getattr(layer, name), output)
            projection.weight.data.zero_()
            if projection.bias is not None:
                projection.bias.data.zero_()
    return student


@pytest.mark.parametrize("part", ["memory", "attention"])
@pytest.mark.parametrize("kind", STUDENTS)
@torch.inference_mode()
def test_without_a_part(kind, part):
    """At once and step by step; and it is back afterwards."""
    student, ids = student_of(kind), tokens()
    whole, wanted = student(ids).logits, zeroed(student, part)(ids).logits
    with without_part(student, part):
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-9, rtol=1e-9)
        cache = DynamicCache(config=student.config)
        found = [student(ids[:, t : t + 1], past_key_values=cache).logits for t in range(ids.shape[1])]
        torch.testing.assert_close(torch.cat(found, 1), wanted, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(whole, wanted, atol=1e-3)
    assert torch.equal(student(ids).logits, whole)


@pytest.mark.parametrize("kind", [kind for kind in STUDENTS if "place" not in kind])
@pytest.mark.parametrize("static", [False, True])
@torch.inference_mode()
def test_an_emptied_memory_says_nothing_of_what_the_window_has_left(kind, static):
    """One layer: two texts that differ beyond its reach alone go on alike."""
    student = student_of(kind, num_hidden_layers=4)
    student.config.num_hidden_layers = 1
    student.model.layers = student.model.layers[:1]
    after, caches = [], []
    for seed in range(2):
        far = torch.randint(2, SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(seed))
        cache = StaticCache(config=student.config, max_cache_len=32) if static else DynamicCache(config=student.config)
        student(torch.cat([far, tokens()[:, : 2 * WINDOW]], 1), past_key_values=cache)
        caches.append(cache)
    for empty in (False, True):
        after = []
        for cache in caches:
            kept = copy.deepcopy(cache)
            if empty:
                zero_memory(kept)
            after.append(student(tokens()[:, -1:], past_key_values=kept).logits)
        assert torch.allclose(*after, atol=1e-9) == empty


def test_refusals():
    windows, _ = upcycle(teacher_of("llama"), keep=[1], others_as="sliding_attention", sliding_window=WINDOW)
    with (
        pytest.raises(ValueError, match="part='window' must be one of 'memory', 'attention'"),
        without_part(windows, "window"),
    ):
        pass
    with pytest.raises(ValueError, match="part='memory': no layer"), without_part(windows, "memory"):
        pass
    cache = windows(tokens(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="the cache holds no memory"):
        zero_memory(cache)
