"""Students return what their teachers return besides: hidden states, attention weights, logits of routers."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.students.teachers import OF_EXPERTS, TEACHERS, student, teacher, tokens, tolerance
from tests.tiny_models import OF_STUDENTS, ids_of, own_language_model

EVERY = pytest.mark.parametrize("name", TEACHERS)
GREEDY = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}


def equal(found, wanted, **by):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **(by or {"rtol": 0, "atol": 0}))


def between_layers(model, ids):
    """What comes into the first layer, out of each but the last, and out of the last norm."""
    base, seen = model.base_model, []
    hooks = [base.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))]
    for layer in base.layers[:-1]:
        hooks.append(layer.register_forward_hook(lambda *given: seen.append(given[-1])))
    try:
        last = base(ids).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return [*(state[0] if isinstance(state, tuple) else state for state in seen), last]


@EVERY
@pytest.mark.parametrize("kind", ["windows", "kept"])
@torch.no_grad()
def test_hidden_states_are_those_between_the_layers(name, kind):
    model, ids = student(name, kind), tokens(2, 12)
    wanted = between_layers(model, ids)
    assert len(wanted) == model.config.num_hidden_layers + 1
    equal(model(ids, output_hidden_states=True).hidden_states, wanted)
    equal(model.base_model(ids, output_hidden_states=True).hidden_states, wanted)
    assert model(ids).hidden_states is None
    if kind == "kept":
        equal(teacher(name)(ids, output_hidden_states=True).hidden_states, wanted, **tolerance(name))


@pytest.mark.parametrize("variant", OF_STUDENTS)
@torch.no_grad()
def test_hidden_states_however_they_are_asked_for(variant, tmp_path):
    model, ids = own_language_model(variant), ids_of(2, 12)
    wanted = between_layers(model, ids)
    model.save_pretrained(tmp_path)
    equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids, output_hidden_states=True).hidden_states, wanted)
    steps = model.generate(ids, return_dict_in_generate=True, output_hidden_states=True, **GREEDY).hidden_states
    assert [len(step) for step in steps] == [len(wanted)] * 3
    equal(steps[0], wanted, rtol=1e-5, atol=1e-5)
    assert all(state.shape == (2, 1, model.config.hidden_size) for step in steps[1:] for state in step)
    model.config.output_hidden_states = True
    equal(model(ids).hidden_states, wanted)
    model.config.output_hidden_states = False
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    equal(adapted(ids, output_hidden_states=True).hidden_states, wanted)


@EVERY
@torch.no_grad()
def test_attention_weights_are_the_teachers_or_refused(name):
    models, ids = [copy.deepcopy(model) for model in (teacher(name), student(name, "kept"))], tokens(2, 12)
    for model in models:
        model.set_attn_implementation("eager")
    if all(layer.is_own for layer in models[1].config.plan.layers):
        wanted, found = (model(ids, output_attentions=True).attentions for model in models)
        assert len(wanted) > 0
        equal(found, wanted, **tolerance(name))
    else:
        with pytest.raises(ValueError, match="output_attentions=True cannot be answered"):
            models[1](ids, output_attentions=True)


@pytest.mark.parametrize("name", OF_EXPERTS)
@pytest.mark.parametrize("kind", ["windows", "kept"])
def test_the_loss_of_routers(name, kind):
    model, ids = student(name, kind), tokens(2, 12)
    output = model(ids, labels=ids, output_router_logits=True)
    assert [logits.shape for logits in output.router_logits] == [(24, 4)] * model.config.num_hidden_layers
    loss = model(ids, labels=ids).loss + model.config.router_aux_loss_coef * output.aux_loss
    torch.testing.assert_close(output.loss, loss)
    if kind == "kept":
        wanted = teacher(name)(ids, labels=ids, output_router_logits=True)
        equal(output.router_logits, wanted.router_logits, **tolerance(name))
        torch.testing.assert_close(output.loss, wanted.loss)
