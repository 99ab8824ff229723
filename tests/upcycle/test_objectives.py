"""What students learn by: documents of a row kept apart, tokens beyond the window weighed, no whole logits held."""

import pytest
import torch

from hf_hybrid_ssm.upcycle import (
    alignment_losses,
    beyond_window,
    distillation_loss,
    fused_distillation_loss,
    has_plain_head,
    memory_window,
    new_modules,
    student_config,
    upcycle,
)
from tests.upcycle.test_upcycle import TEACHERS, teacher_of, tokens

STUDENTS = {
    "longhorn": {"keep": [1], "state_size": 4},
    "bst": {"family": "bst", "sliding_window": 6, "ssm_layers": [0, 2], "ssm_state_size": 4},
}
BORDER = 17
PACKED = torch.cat([torch.arange(BORDER), torch.arange(30 - BORDER)])[None].expand(2, -1)


def student_of(teacher, name, **more):
    """With what is new opened, so that losses are of some size."""
    torch.manual_seed(1)
    student, _ = upcycle(teacher, **STUDENTS[name] | more)
    with torch.no_grad():
        for module in new_modules(student):
            for parameter in student.get_submodule(module).parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return student


@pytest.mark.parametrize("name", STUDENTS)
def test_documents_of_a_row_are_aligned_apart(name):
    """The distance over a packed row is that of its documents, each alone."""
    teacher = teacher_of("llama").double()
    student = student_of(teacher, name)
    ids = tokens()
    packed = alignment_losses(student, teacher, input_ids=ids, position_ids=PACKED)
    one_row = alignment_losses(student, teacher, input_ids=ids)
    parts = [alignment_losses(student, teacher, input_ids=part) for part in (ids[:, :BORDER], ids[:, BORDER:])]
    for layer, loss in packed.items():
        low, high = sorted(part[layer].item() for part in parts)
        assert low <= loss <= high  # a mean, weighed by what the attention puts out
        assert abs(loss - one_row[layer]) > 1e-6


@pytest.mark.parametrize("name", STUDENTS)
def test_only_tokens_that_count_are_aligned(name):
    teacher = teacher_of("llama").double()
    student = student_of(teacher, name)
    ids, weights = tokens(), torch.zeros(2, 30)
    weights[:, :9] = 1.0
    found = alignment_losses(student, teacher, token_weights=weights, input_ids=ids)
    begin = alignment_losses(student, teacher, input_ids=ids[:, :9])  # causal: what follows changes nothing
    for layer, loss in found.items():
        torch.testing.assert_close(loss, begin[layer])


def test_tokens_beyond_the_window():
    ids = tokens()
    weights = beyond_window(6, 0.25, input_ids=ids)
    assert weights.shape == ids.shape and weights[:, :7].eq(0.25).all() and weights[:, 7:].eq(1).all()
    weights = beyond_window(6, 0.25, input_ids=ids, position_ids=PACKED)
    assert (weights == torch.where(PACKED > 6, 1.0, 0.25)).all()
    for within in (0, 1.5, -1):
        with pytest.raises(ValueError, match=rf"within={within} must lie above 0"):
            beyond_window(6, within, input_ids=ids)


@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize("name", STUDENTS)
def test_fused_distillation_is_distillation(name, kind):
    teacher = teacher_of(kind)
    student = student_of(teacher, name)
    given = {"input_ids": tokens(), "position_ids": PACKED}
    weights = beyond_window(6, 0.25, **given)
    with torch.no_grad():
        output = teacher(**given, output_hidden_states=True, use_cache=False)
    states, head = output.hidden_states[-1], teacher.lm_head.weight
    assert has_plain_head(student) and has_plain_head(teacher)

    def gradients(loss):
        student.zero_grad()
        loss.backward()
        return {key: value.grad.clone() for key, value in student.named_parameters() if value.grad is not None}

    fused = fused_distillation_loss(student, states, head, temperature=2.0, **given)
    whole = distillation_loss(student(**given, use_cache=False).logits, output.logits, 2.0)
    torch.testing.assert_close(fused, whole, rtol=1e-4, atol=1e-6)
    found, wanted = gradients(fused), gradients(whole)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    counted = weights > 0.5
    beyond = fused_distillation_loss(student, states, head, token_weights=counted.float(), **given)
    ours, theirs = student(**given, use_cache=False).logits[counted], output.logits[counted]
    torch.testing.assert_close(beyond, distillation_loss(ours, theirs), rtol=1e-4, atol=1e-6)
    weighed = fused_distillation_loss(student, states, head, token_weights=weights, **given)
    whole = distillation_loss(student(**given, use_cache=False).logits, output.logits, token_weights=weights)
    torch.testing.assert_close(weighed, whole, rtol=1e-4, atol=1e-6)


def test_which_students_remember_beside_a_window():
    teacher = teacher_of("llama").config
    assert memory_window(student_config(teacher, family="bst", sliding_window=6)) == 6
    assert memory_window(student_config(teacher, family="bst", sliding_window=6, ssm_layers=[])) is None
    assert memory_window(student_config(teacher, keep=1.0, keep_as="sliding_attention")) is None
    assert memory_window(student_config(teacher, keep=[1])) is None
    beside = ["hybrid_sliding"] * 4
    assert memory_window(student_config(teacher, block_types=beside, sliding_window=6)) == 5


def test_stored_states_may_be_narrower():
    teacher = teacher_of("llama")
    student = student_of(teacher, "longhorn")
    ids = tokens()
    with torch.no_grad():
        states = teacher.model(ids).last_hidden_state
    wide = fused_distillation_loss(student, states, teacher.lm_head.weight, input_ids=ids)
    narrow = fused_distillation_loss(student, states.bfloat16(), teacher.lm_head.weight, input_ids=ids)
    torch.testing.assert_close(narrow, wide, rtol=1e-2, atol=0)


def test_a_head_with_an_adapter_is_not_plain():
    from peft import LoraConfig, get_peft_model

    student = student_of(teacher_of("llama", tie_word_embeddings=False), "longhorn")
    assert has_plain_head(student)
    assert not has_plain_head(get_peft_model(student, LoraConfig(r=2, target_modules=["lm_head"])).get_base_model())
