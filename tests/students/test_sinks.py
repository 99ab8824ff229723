"""What takes the place of a first token that a window has left."""

import copy

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from hf_hybrid_ssm.models.outputs import CACHE
from hf_hybrid_ssm.students.initial import choose_sink, first_token_ids, init_sinks, student_of
from hf_hybrid_ssm.training.optim import parameter_groups
from tests.students.teachers import (
    SIZES,
    TEACHERS,
    WINDOW,
    exactly,
    full_layers,
    masked,
    student,
    teacher,
    tokens,
    tolerance,
)

LENGTH = 24
SCALE, FLOOR = 0.3, 4
EVERY = pytest.mark.parametrize("name", TEACHERS)


@pytest.mark.parametrize("name", [name for name in TEACHERS if name != "gpt_oss"])  # which has sinks of its own
def test_a_first_token_that_is_kept_equals_a_teacher_that_sees_it(name):
    ids, (first, *_, last) = tokens(2, LENGTH), full_layers(name)
    wanted = masked(name, ids, [(first, 1)], [last], first=True)
    torch.testing.assert_close(student(name, "first_token")(ids).logits, wanted, **tolerance(name))
    assert (student(name, "mixed")(ids).logits - wanted).abs().max() > 1e-3


@EVERY
def test_a_constant_sink_is_where_it_was_whatever_the_positions(name):
    """And within the first window the student is the teacher. (Hunyuan norms keys after they are turned: it sees where
    a text begins itself.)"""
    model, ids = student(name, "constant in all"), tokens(2, LENGTH)
    found = model(ids).logits
    torch.testing.assert_close(found[:, : WINDOW + 1], teacher(name)(ids[:, : WINDOW + 1]).logits, **tolerance(name))
    assert (found - student(name, "windows")(ids).logits).abs().max() > (1e-3 if name != "gpt_oss" else -1)
    if name != "hunyuan_v1_dense":
        shifted = model(ids, position_ids=torch.arange(LENGTH)[None] + 50).logits
        torch.testing.assert_close(shifted, found, rtol=0, atol=1e-5)  # transformers' angles are of float32


def first_tokens_states(model, ids):
    """Keys and values (G, e) of each layer, the means over texts of one token: what transformers' cache then holds,
    where keys are turned by nothing but have the scale of the rotation."""
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    scale = model.model.rotary_emb.attention_scaling
    return [(layer.keys[:, :, 0].mean(0) / scale, layer.values[:, :, 0].mean(0)) for layer in cache.layers]


def with_windows_and_sinks(name, keep):
    """A teacher with windows but in layers, or (layer, group), that are kept, whose queries grow with their position
    by 1 + a log(1 + ⌊(p + 1) / f⌋): softmax by its equation, a column for the sink. Its queries are already turned by
    their positions; they are turned back, and by W + 1."""
    model = exactly(copy.deepcopy(teacher(name)))
    sinks, rotary = first_tokens_states(model, first_token_ids(SIZES["vocab_size"])), model.model.rotary_emb
    frequencies, scale, away = rotary.inv_freq.double(), rotary.attention_scaling, WINDOW + 1

    def attend(module, query, key, value, attention_mask, scaling, **options):
        length, shared = query.shape[2], query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
        rank, layer = torch.arange(length), module.layer_idx
        heads = [layer in keep or (layer, head // shared) in keep for head in range(query.shape[1])]
        is_full = torch.tensor(heads)[:, None, None]
        passed = torch.where(is_full[..., 0], (rank + 1) // FLOOR, 0)
        logits = query * (1 + SCALE * (1 + passed).log())[..., None] @ key.transpose(2, 3) * scaling
        distance = rank[:, None] - rank
        logits = logits.masked_fill((distance < 0) | (~is_full & (distance > WINDOW)), -torch.inf)
        sink, own = (x.repeat_interleave(shared, 0) for x in sinks[layer])
        half = query.shape[3] // 2
        turn = torch.polar(torch.ones(()).double(), frequencies * (away - rank[:, None]))
        z = torch.complex(query[..., :half], query[..., half:]) * turn
        column = (torch.cat([z.real, z.imag], -1) * sink[:, None] * scale).sum(-1, keepdim=True) * scaling
        column = column.masked_fill(is_full | (rank <= WINDOW)[:, None], -torch.inf)
        value = torch.cat([value, own[:, None].expand(len(value), -1, 1, -1)], 2)
        weights = torch.cat([logits, column], -1).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("windows_and_sinks", attend)
    model.set_attn_implementation("windows_and_sinks")
    return model


@pytest.mark.parametrize("keep", [[], [2], [(0, 1), (2, 0)]], ids=["windows", "a layer", "groups"])
@pytest.mark.parametrize("name", ["llama", "mistral", "phi3", "qwen2", "qwen3"])
@torch.no_grad()
def test_equals_its_equation(name, keep):
    """In float64; transformers' norms and angles are of float32, and exact here."""
    ids = tokens(2, LENGTH)
    new = student_of(teacher(name), keep=keep, window=WINDOW, attn_scale=SCALE, floor_scale=FLOOR)
    sinks = [module.sink for module in new.base_model.modules() if hasattr(module, "sink")]
    assert len(sinks) == 3 + (len(keep) != 1)
    wanted = with_windows_and_sinks(name, keep)(ids).logits
    init_sinks(exactly(new), first_token_ids(SIZES["vocab_size"]))
    torch.testing.assert_close(new(ids).logits, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi"])
def test_a_sink_is_the_mean_first_key_not_yet_turned(name):
    """`llama` has YaRN here, which scales keys, and `phi` turns half of a head."""
    model = student_of(teacher(name), window=WINDOW)
    init_sinks(model, torch.tensor([[5], [9]]))
    keys = {}

    class Look:
        def attend(self, module, query, key, value, *others, **options):
            keys[module.layer_idx] = key.mean(0)[:, 0]
            return query.transpose(1, 2) * 0, None

    ids = torch.tensor([[5], [9]])
    model.base_model(ids, position_ids=torch.zeros_like(ids), student=Look())
    module = model.base_model.layers[full_layers(name)[0]].self_attn
    scale = getattr(model.base_model.rotary_emb, "attention_scaling", 1.0)
    assert (scale > 1) == (name == "llama")
    if full_layers(name)[0] == 0:  # those above have read other outputs of attention
        torch.testing.assert_close(module.sink.key * scale, keys[0])


def test_a_text_must_be_longer_than_the_window():
    """What the choice of a sink does is tested with whole students (`tests/upcycle/test_sinks.py`)."""
    with pytest.raises(ValueError, match="more than 7 tokens are needed"):
        choose_sink(student_of(teacher("llama"), window=WINDOW), tokens(2, 7))


def test_sinks_are_not_decayed():
    model = copy.deepcopy(student("qwen3", "constant")).requires_grad_(True)
    groups = parameter_groups(model, weight_decay=0.1)
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    sinks = [parameter for name, parameter in model.named_parameters() if ".sink." in name]
    assert sinks and {decay[id(parameter)] for parameter in sinks} == {0.0}
    assert 0.1 in decay.values()
