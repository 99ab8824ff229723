"""What takes the place of a first token that a window has left."""

import pytest
import torch

from hf_hybrid_ssm.students.initial import choose_sink, first_token_ids, init_sinks, student_of
from hf_hybrid_ssm.upcycle import upcycle
from hf_hybrid_ssm.upcycle.fused_teachers import unfused
from tests.students.teachers import TEACHERS, WINDOW, exactly, full_layers, masked, student, teacher, tokens, tolerance

LENGTH = 24
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


@pytest.mark.parametrize("keep", [[], [2], [(0, 1), (2, 0)]], ids=["windows", "a layer", "groups"])
@pytest.mark.parametrize("name", ["llama", "mistral", "phi3", "qwen2", "qwen3"])
def test_equals_the_student_of_a_family(name, keep):
    """Of Longhorn with options, in float64; transformers' norms and angles are of float32, and exact here."""
    own, ids = teacher(name), tokens(2, LENGTH)
    old, _ = upcycle(
        unfused(own) if name == "phi3" else own, keep=keep, others_as="sliding_attention", sliding_window=WINDOW + 1
    )
    new = student_of(own, keep=keep, window=WINDOW, attn_scale=0.1)
    sinks = [module.sink for module in new.base_model.modules() if hasattr(module, "sink")]
    assert len(sinks) == 3 + (len(keep) != 1)
    wanted, found = (exactly(model)(ids).logits for model in (old, new))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


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


def test_a_sink_that_costs_too_much_gives_way_to_the_first_token():
    model, ids = student_of(teacher("llama"), window=WINDOW), tokens(2, 60)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sink.key.fill_(30.0)
    choice = choose_sink(model, ids)
    assert choice.sink == "first_token" and choice.constant > choice.first_token + 0.02
    assert "do not hold" in str(choice) and "over 106 tokens" in str(choice)
    assert not [name for name, _ in model.named_parameters() if "sink" in name]
    assert {layer.sink for layer in model.config.plan.layers} == {"first_token"}
    wanted = student_of(teacher("llama"), window=WINDOW, sink="first_token")
    assert torch.equal(model(ids).logits, wanted(ids).logits)


def test_a_sink_that_is_the_first_token_holds():
    model = student_of(teacher("llama"), window=WINDOW)
    before = model(tokens(2, 60)).logits
    choice = choose_sink(model, tokens(2, 60), most=100.0)
    assert choice.sink == "constant" and "hold (" in str(choice)
    assert torch.equal(model(tokens(2, 60)).logits, before)
    with pytest.raises(ValueError, match="more than 7 tokens are needed"):
        choose_sink(model, tokens(2, 7))


def test_first_tokens_without_a_tokenizer_are_drawn_from_the_vocabulary():
    assert sorted(first_token_ids(90)[:, 0].tolist()) == list(range(90))
    assert first_token_ids(1000).shape == (256, 1) and torch.equal(first_token_ids(1000), first_token_ids(1000))
