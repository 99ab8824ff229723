"""Students without their memory or their attention, and with an emptied memory."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_hybrid_ssm.models.outputs import CACHE
from hf_hybrid_ssm.upcycle import Keep, Teacher, upcycle
from hf_hybrid_ssm.upcycle.ablations import without_part, zero_memory
from tests.upcycle.test_upcycle import MEMORIES, SIZES, teacher_of, tokens

WINDOW = 6
KINDS = [(name, memory) for name in ("llama", "gemma3") for memory in MEMORIES if memory != "windows"]


def student_of(memory: str, name: str = "llama", keep=(1,), **fields):
    """With weights that are away from their start, so that every part is heard."""
    options = {"sink": "constant", "init": "random", **MEMORIES[memory]}
    student, _ = upcycle(
        Teacher(teacher_of(name, torch.float64, **fields)), Keep(list(keep), window=WINDOW), **options
    )
    torch.manual_seed(0)
    for parameter in student.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return student.eval()


def zeroed(student, part: str):
    """The student whose output projections have zeros where the part comes in."""
    student = copy.deepcopy(student)
    for layer in student.model.layers:
        module = layer.self_attn
        memory = getattr(module, "memory", None)
        if part == "memory" and memory is not None:
            projections = [memory.o_proj if hasattr(memory, "context") else memory.out_proj]
        else:
            projections = [module.o_proj] if part == "attention" and hasattr(module, "o_proj") else []
        for projection in projections:
            projection.weight.data.zero_()
            if projection.bias is not None:
                projection.bias.data.zero_()
    return student


@pytest.mark.parametrize("part", ["memory", "attention"])
@pytest.mark.parametrize(("name", "memory"), KINDS)
@torch.inference_mode()
def test_without_a_part(name, memory, part):
    """At once and step by step; and it is back afterwards."""
    student, ids = student_of(memory, name), tokens()
    whole, wanted = student(ids).logits, zeroed(student, part)(ids).logits
    with without_part(student, part):
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-9, rtol=1e-9)
        cache = DynamicCache(config=student.config)
        found = [student(ids[:, t : t + 1], **{CACHE: cache}).logits for t in range(ids.shape[1])]
        torch.testing.assert_close(torch.cat(found, 1), wanted, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(whole, wanted, atol=1e-3)
    assert torch.equal(student(ids).logits, whole)


@pytest.mark.parametrize("memory", ["mixers beside", "context states"])
@pytest.mark.parametrize("static", [False, True])
@torch.inference_mode()
def test_an_emptied_memory_says_nothing_of_what_the_window_has_left(memory, static):
    """One layer: two texts that differ beyond its reach alone go on alike."""
    student = student_of(memory, keep=(), num_hidden_layers=1)
    caches = []
    for seed in range(2):
        far = torch.randint(2, SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(seed))
        cache = StaticCache(config=student.config, max_cache_len=32) if static else DynamicCache(config=student.config)
        student(torch.cat([far, tokens()[:, : 2 * WINDOW]], 1), **{CACHE: cache})
        caches.append(cache)
    for empty in (False, True):
        after = []
        for cache in caches:
            kept = copy.deepcopy(cache)
            if empty:
                zero_memory(kept)
            after.append(student(tokens()[:, -1:], **{CACHE: kept}).logits)
        assert torch.allclose(*after, atol=1e-9) == empty


def test_refusals():
    windows = student_of("windows")
    with (
        pytest.raises(ValueError, match="part='window' must be one of 'memory', 'attention'"),
        without_part(windows, "window"),
    ):
        pass
    with pytest.raises(ValueError, match="part='memory': no layer"), without_part(windows, "memory"):
        pass
    cache = windows(tokens(), use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="the cache holds no memory"):
        zero_memory(cache)
