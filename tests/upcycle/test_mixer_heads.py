"""Mixers beside windows of attention: unheard at first, with the attention's own heads inside."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan
from hf_hybrid_ssm.upcycle import alignment_losses, new_modules, student_config, upcycle
from hf_hybrid_ssm.upcycle.mixer_heads import init_from_heads
from tests.tiny_models import compiles
from tests.upcycle.test_upcycle import SIZES, TEACHERS, teacher_of, tokens

WINDOW = 7
FIELDS = {"keep": 0.0, "sliding_window": WINDOW}


def students(teacher, **fields):
    """A student with mixers, and the same with windows alone."""
    beside, _ = upcycle(teacher, others_as="hybrid_sliding", **FIELDS | fields)
    alone, report = upcycle(teacher, others_as="sliding_attention", **FIELDS)
    assert not report.translated and not report.dropped
    return beside.eval(), alone.eval()


def near(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("init", ["projections", "random"])
@pytest.mark.parametrize("name", TEACHERS)
@torch.no_grad()
def test_before_training_the_student_is_its_windowed_self(name, init):
    """And its teacher as long as the text fits the window; at once, step by step and with padding."""
    teacher = teacher_of(name)
    beside, alone = students(teacher, init=init)
    assert beside.config.block_types == ["hybrid_sliding"] * 4
    for seed in range(4):
        torch.manual_seed(seed)
        length = int(torch.randint(2, 40, ()))
        ids, mask = torch.randint(2, SIZES["vocab_size"], (2, length)), torch.ones(2, length, dtype=torch.long)
        mask[1, : seed % length] = 0
        real = mask.bool()
        wanted = alone(ids, attention_mask=mask).logits
        near(beside(ids, attention_mask=mask).logits[real], wanted[real])
        near(beside(ids[:, :WINDOW]).logits, teacher(ids[:, :WINDOW]).logits)
        for cache in (DynamicCache(config=beside.config), StaticCache(config=beside.config, max_cache_len=length)):
            wanted, split = alone(ids).logits, length // 2
            found = [beside(ids[:, :split], past_key_values=cache).logits] if split else []
            for t in range(split, length):
                found.append(beside(ids[:, t : t + 1], past_key_values=cache).logits)
            near(torch.cat(found, 1), wanted)


@compiles
@torch.no_grad()
def test_compiled_it_is_its_windowed_self():
    beside, alone = students(teacher_of("llama"))
    compiled = torch.compile(beside, fullgraph=True, backend="aot_eager")
    near(compiled(tokens(), use_cache=False).logits, alone(tokens()).logits)


@pytest.mark.parametrize("name", TEACHERS)
@torch.no_grad()
def test_the_scan_has_the_attentions_heads(name):
    """What the mixer reads from each head is the recurrence over the attention's own queries, keys and values."""
    student = students(teacher_of(name))[0].double()
    layer, size, heads = student.model.layers[1], student.config.head_dim, 4
    u = torch.randn(2, 25, SIZES["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    positions = student.model.rotary_emb(u, torch.arange(25)[None])
    read = []
    hook = layer.mixer.out_proj.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    layer.mixer(u, position_embeddings=positions)
    hook.remove()
    y = read[0].unflatten(-1, (heads, -1))
    queries, keys, values = layer.self_attn.heads(u, positions)[:3]  # the sink has more
    keys, values = (part.repeat_interleave(heads // 2, dim=2) for part in (keys, values))
    scale = keys_energy(layer).repeat_interleave(heads // 2) / size**1.5
    logits = layer.mixer.dt_bias.unflatten(0, (heads, -1))
    assert bool((logits == logits[:, :1]).all())
    for head in range(heads):
        logit = logits[head, 0].expand(2, 25, size)
        wanted, _ = longhorn_scan(
            values[:, :, head], logit, keys[:, :, head], scale[head] * queries[:, :, head], backend="reference"
        )
        found = y[:, :, head, :size] - y[:, :, head, size : 2 * size]
        assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()  # weights were rounded to float32


def keys_energy(layer) -> torch.Tensor:
    """E|k|² of each group, from normed inputs that are drawn."""
    attention = layer.self_attn
    if attention.k_norm is not None:
        return attention.k_norm.weight.square().sum().expand(2)
    weight = (attention.k_proj.weight * layer.norm.weight).unflatten(0, (2, -1))
    bias = attention.k_proj.bias
    energy = weight.square().sum((1, 2))
    return energy if bias is None else energy + bias.unflatten(0, (2, -1)).square().sum(1)


@torch.no_grad()
def test_heads_forget_within_one_to_sixteen_windows():
    """A state that nothing is written to, at the keys of normed inputs that are drawn: 1/e of it is left."""
    student = upcycle(teacher_of("llama"), others_as="hybrid_sliding", keep=0.0, sliding_window=50)[0].double()
    layer, size = student.model.layers[0], student.config.head_dim
    torch.manual_seed(0)
    u = layer.norm(torch.randn(1, 4000, SIZES["hidden_size"], dtype=torch.float64))
    keys = layer.mixer.k_proj(u).unflatten(-1, (4, size))
    logits = layer.mixer.dt_bias.unflatten(0, (4, -1))[:, 0]
    delta = 1 / (1 + torch.exp(-logits) + keys.square().sum(-1))
    forgetting = (delta.unsqueeze(-1) * keys.square()).mean((0, 1, 3))  # of a number of the state, for each token
    torch.testing.assert_close(1 / forgetting, 50.0 * 16.0 ** (torch.arange(4) / 3).double(), rtol=0.25, atol=0)


def test_alignment_teaches_the_mixers_alone():
    teacher = teacher_of("qwen2")
    student, _ = upcycle(teacher, others_as="hybrid_sliding", keep=[0], sliding_window=4)
    assert new_modules(student) == [f"model.layers.{index}.mixer" for index in (1, 2, 3)]
    windows, _ = upcycle(teacher, others_as="sliding_attention", keep=[0], sliding_window=4)
    for parameter in student.parameters():
        parameter.requires_grad_(False)
    mixers = [student.get_submodule(name) for name in new_modules(student)]
    trained = [parameter.requires_grad_() for mixer in mixers for parameter in mixer.parameters()]
    optimizer, losses = torch.optim.Adam(trained, 3e-3), []
    for _ in range(40):
        found = alignment_losses(student, teacher, input_ids=tokens())
        assert list(found) == [1, 2, 3]
        losses.append(torch.stack(list(found.values())).sum())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    for name, parameter in windows.named_parameters():
        assert torch.equal(student.get_parameter(name), parameter), name


def test_what_fits_no_head_is_refused():
    teacher = teacher_of("llama")
    with pytest.raises(ValueError, match="others_as='mamba' must be one of"):
        student_config(teacher.config, others_as="mamba")
    with pytest.raises(ValueError, match="others_as=hybrid_sliding are for Longhorn"):
        student_config(teacher.config, family="bst", others_as="hybrid_sliding")
    for fields, words in (
        ({"num_heads": 2}, "num_heads=2 of the mixer, but the attention's heads need num_heads=4"),
        ({"use_qk_proj": False}, "use_qk_proj=False"),
        ({"use_bias": False}, "use_bias=False"),
        ({"expand": 1}, "the values of 4 heads have 32 channels, which need 64 of the mixer .*, not 32"),
    ):
        with pytest.raises(ValueError, match=words):
            upcycle(teacher, others_as="hybrid_sliding", **FIELDS | fields)
    with pytest.raises(ValueError, match="starts from one pair of keys and queries"):
        upcycle(teacher, keep=0.0, num_heads=2)
    student, _ = upcycle(teacher, others_as="hybrid_sliding", **FIELDS)
    normed = teacher_of("qwen3", head_dim=8).model.layers[0].self_attn
    with pytest.raises(ValueError, match="use_qk_norm=False of the mixer must be True"):
        init_from_heads(student.model.layers[0].mixer, normed, student.model.layers[0].norm, WINDOW)
