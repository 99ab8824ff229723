"""What students have beside their teachers' attention, by its equations."""

import copy
import math

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_hybrid_ssm.models.packing import packed_rows
from hf_hybrid_ssm.students.initial import student_of
from hf_hybrid_ssm.training.optim import parameter_groups
from tests.row_options import longhorn_scan
from tests.students.teachers import WINDOW, masked, student, teacher, tokens

LENGTH = 17
NAMES = pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
CONTEXT = {"sh": {}, "mh": {"context_variant": "mh"}, "mf": {"context_variant": "mf", "num_context_states": 3}}


def with_memory(name, **plan):
    """A student whose memories have random weights."""
    model, generator = student_of(teacher(name), window=WINDOW, sink=None, **plan), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".memory." in parameter_name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def inputs(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, LENGTH, 32, dtype=torch.float64, generator=generator) for _ in range(count)]


def normed(x, norm):
    """By a norm of each head, if there is one."""
    if norm is None:
        return x
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight


@torch.no_grad()
def test_queries_that_see_all_tokens_grow_with_their_position():
    """By 1 + a log(1 + ⌊(p + 1) / f⌋), in kept layers and in kept groups, and no others."""
    scale, floor, kept = 0.3, 4, {(0, 1), (2, 0), (2, 1)}
    model = student_of(
        teacher("llama"), keep=[(0, 1), 2], window=WINDOW, sink=None, attn_scale=scale, floor_scale=floor
    )
    ids = tokens(2, 21)

    def attend(module, query, key, value, mask, **options):
        factors = torch.tensor([1 + scale * math.log(1 + (p + 1) // floor) for p in range(query.shape[2])]).double()
        sees_all = torch.tensor([(module.layer_idx, head // 2) in kept for head in range(4)])
        query = query * torch.where(sees_all[:, None], factors, 1.0)[..., None]
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("multiplied_by_hand", attend)
    AttentionMaskInterface.register("multiplied_by_hand", sdpa_mask)
    own, before = teacher("llama"), teacher("llama").config._attn_implementation
    own.set_attn_implementation("multiplied_by_hand")
    try:
        wanted = masked("llama", ids, groups_that_see_all={(0, 1)}, layers=[2])
    finally:
        own.set_attn_implementation(before)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-6)  # of factors in float32
    plain = student_of(own, keep=[(0, 1), 2], window=WINDOW, sink=None)(ids).logits
    assert (plain - wanted)[:, floor:].abs().amax(-1).min() > 1e-4
    assert (plain - wanted)[:, : floor - 1].abs().max() < 1e-6


@NAMES
@torch.no_grad()
def test_a_mixer_beside_attention(name):
    """k and q are maps of its input that no convolution has seen, with the attention's norms and rotation; each head
    has its share of the channels."""
    model = with_memory(name, memory="longhorn")
    memory, (u,) = model.model.layers[0].self_attn.memory, inputs(1)
    cosines, sines = model.model.rotary_emb(u, torch.arange(LENGTH)[None])
    x, z = memory.in_proj(u).chunk(2, dim=-1)
    x, _ = memory.conv1d(x)

    def heads(projection, norm):
        part = normed(projection(u).unflatten(-1, (4, 8)), norm)
        return part * cosines[:, :, None] + torch.cat([-part[..., 4:], part[..., :4]], -1) * sines[:, :, None]

    k, q = heads(memory.k_proj, memory.k_norm), heads(memory.q_proj, memory.q_norm)
    options = {"beta_bias": memory.dt_bias, "D": memory.D, "z": z, "backend": "reference"}
    y, _ = longhorn_scan(x, memory.dt_proj(memory.x_proj(x)), k, q, **options)
    found, _ = memory(u, cosines, sines, past={}, rows=packed_rows(length=LENGTH))
    torch.testing.assert_close(found, memory.out_proj(y), rtol=0, atol=1e-6)  # of angles and norms in float32


@pytest.mark.parametrize("variant", CONTEXT)
@NAMES
@torch.no_grad()
def test_context_states_beside_attention(name, variant):
    """Each token attends to the states of its block, in groups that queries share, with the attention's norms."""
    model = with_memory(name, memory="context", ssm_state_size=4, **CONTEXT[variant])
    memory, (z, x) = model.model.layers[0].self_attn.memory, inputs(2)
    context, found = memory.context, []
    y = context.ssm(context.input_norm(x))[0][0]
    queries = normed(memory.q_proj(z)[0].unflatten(-1, (4, 8)), memory.q_norm) / 8**0.5
    for t in range(LENGTH):
        start = t - t % WINDOW
        if variant == "mf":
            states = context.norm(context.initial_context if start == 0 else y[start - 1]) + context.context_ids
        else:
            states = context.norm(y[start : t + 1])
        keys, values = context.k_proj(states), context.v_proj(states)
        keys, values = (part.view(len(part), 2, 8) for part in (keys, values))
        keys, values = (part.repeat_interleave(2, 1) for part in (normed(keys, context.k_norm), values))
        weights = (queries[t] * keys).sum(-1).softmax(0)
        found.append((weights[..., None] * values).sum(0).flatten())
    output, _ = memory(z, x, past={}, rows=packed_rows(length=LENGTH))
    torch.testing.assert_close(output[0], memory.o_proj(torch.stack(found)), rtol=0, atol=1e-10)


def test_sinks_are_not_decayed():
    model = copy.deepcopy(student("qwen3", "constant")).requires_grad_(True)
    groups = parameter_groups(model, weight_decay=0.1)
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    sinks = [parameter for name, parameter in model.named_parameters() if ".sink." in name]
    assert sinks and {decay[id(parameter)] for parameter in sinks} == {0.0}
    assert 0.1 in decay.values()
