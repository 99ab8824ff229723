"""What students learn by: documents of a row kept apart, tokens beyond the window weighed, no whole logits held."""

import pytest
import torch

from hf_hybrid_ssm.upcycle import Keep, Teacher, alignment_losses, distillation_loss, fused_distillation_loss, upcycle
from hf_hybrid_ssm.upcycle.objectives import beyond_window, has_plain_head
from hf_hybrid_ssm.upcycle.student import new_modules
from tests.upcycle.test_upcycle import MEMORIES, TEACHERS, teacher_of, tokens

WITH_MEMORY = [name for name in MEMORIES if name != "windows"]
BORDER = 17
PACKED = torch.cat([torch.arange(BORDER), torch.arange(30 - BORDER)])[None].expand(2, -1)


def student_of(teacher, name, **more):
    """With what is new opened, so that losses are of some size."""
    torch.manual_seed(1)
    options = {"sink": "constant", **MEMORIES[name], **more}
    known = Teacher(teacher)
    student, _ = upcycle(known, Keep([known.layers[1]], window=6), **options)
    with torch.no_grad():
        for module in new_modules(student):
            for parameter in student.get_submodule(module).parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return student


@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "granite"])
def test_documents_of_a_row_are_aligned_apart(kind, name):
    """The distance over a packed row is that of its documents, each alone."""
    teacher = teacher_of(kind, torch.float64)
    student = student_of(teacher, name)
    ids = tokens()
    packed = alignment_losses(student, teacher, input_ids=ids, position_ids=PACKED)
    one_row = alignment_losses(student, teacher, input_ids=ids)
    parts = [alignment_losses(student, teacher, input_ids=part) for part in (ids[:, :BORDER], ids[:, BORDER:])]
    for layer, loss in packed.items():
        low, high = sorted(part[layer].item() for part in parts)
        assert low <= loss <= high  # a mean, weighed by what the attention puts out
        assert abs(loss - one_row[layer]) > 1e-6


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_only_tokens_that_count_are_aligned(name):
    teacher = teacher_of("llama", torch.float64)
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


# whose logits nothing scales, and whose layers keep packed documents apart
PLAIN = [name for name in TEACHERS if name not in ("granite", "lfm2")]


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "windows") for kind in PLAIN), *(("llama", name) for name in WITH_MEMORY)]
)
def test_fused_distillation_is_distillation(name, kind):
    teacher = teacher_of(kind)
    student = student_of(teacher, name)
    given = {"input_ids": tokens(), "position_ids": PACKED}
    weights = beyond_window(6, 0.25, **given)
    with torch.no_grad():
        output = teacher(**given, output_hidden_states=True, use_cache=False)
    states, head = output.hidden_states[-1], teacher.get_output_embeddings().weight
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


def test_a_head_that_scales_is_not_plain():
    assert not has_plain_head(teacher_of("granite")) and has_plain_head(teacher_of("gemma3"))
    student = student_of(teacher_of("llama"), "mixers beside", window_dropout=0.5).train()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert has_plain_head(student) and student.training and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_alignment_teaches_what_is_new(name):
    """Gradients reach the attention that has a memory, and that alone; with it and the memory the losses fall."""
    teacher = teacher_of("qwen2")
    student = student_of(teacher, name)
    losses = alignment_losses(student, teacher, input_ids=tokens(), labels=tokens())
    assert list(losses) == [0, 2, 3] and min(losses.values()) > 1e-3
    torch.stack(list(losses.values())).sum().backward()
    moved = {key for key, parameter in student.named_parameters() if parameter.grad is not None}
    assert moved and all(".self_attn." in key and ".1." not in key for key in moved)
    assert any(".memory." in key for key in moved)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    memories = [student.get_submodule(module) for module in new_modules(student)]
    optimizer = torch.optim.Adam([parameter for memory in memories for parameter in memory.parameters()], 3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        torch.stack(list(alignment_losses(student, teacher, input_ids=tokens()).values())).sum().backward()
        optimizer.step()
    after = alignment_losses(student, teacher, input_ids=tokens())
    assert all(after[index] < 0.9 * losses[index] for index in losses)


@pytest.mark.parametrize("name", ["mixers beside", "context states"])
def test_with_wide_windows_nothing_is_left_to_align(name):
    teacher = Teacher(teacher_of("qwen3"))
    student, _ = upcycle(teacher, Keep(0, window=40), sink="constant", **MEMORIES[name])
    assert max(alignment_losses(student, teacher.model, input_ids=tokens()).values()) < 1e-10


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_mixer_instead_is_nearer_to_the_attention_than_a_random_one(name):
    teacher = Teacher(teacher_of(name))
    losses = {}
    for init in ("projections", "random"):
        torch.manual_seed(2)
        student, _ = upcycle(teacher, Keep(0), memory="longhorn", instead=True, init=init, expand=4)
        losses[init] = alignment_losses(student, teacher.model, input_ids=tokens())
    assert list(losses["projections"]) == teacher.layers
    for index, loss in losses["projections"].items():
        assert loss < 0.95 < losses["random"][index]


def test_checkpointed_layers_are_aligned_as_others():
    teacher = teacher_of("llama")
    student = student_of(teacher, "mixers beside").train()
    wanted = alignment_losses(student, teacher, input_ids=tokens())
    student.gradient_checkpointing_enable()
    found = alignment_losses(student, teacher, input_ids=tokens())
    assert all(torch.equal(found[layer], loss) for layer, loss in wanted.items())
    assert student.model.layers[0].gradient_checkpointing


def test_stored_states_may_be_narrower():
    teacher = teacher_of("llama")
    student = student_of(teacher, "mixers beside")
    ids = tokens()
    with torch.no_grad():
        states = teacher.model(ids).last_hidden_state
    wide = fused_distillation_loss(student, states, teacher.lm_head.weight, input_ids=ids)
    narrow = fused_distillation_loss(student, states.bfloat16(), teacher.lm_head.weight, input_ids=ids)
    torch.testing.assert_close(narrow, wide, rtol=1e-2, atol=0)


def test_a_head_with_an_adapter_is_not_plain():
    from peft import LoraConfig, get_peft_model

    student = student_of(teacher_of("llama", tie_word_embeddings=False), "windows")
    assert has_plain_head(student)
    assert not has_plain_head(get_peft_model(student, LoraConfig(r=2, target_modules=["lm_head"])).get_base_model())


def test_distillation_is_the_divergence():
    ours, theirs = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    p, q = (torch.softmax(part / 2, -1) for part in (theirs, ours))
    wanted = 4 * (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(distillation_loss(ours, theirs, 2.0).double(), wanted, atol=1e-5, rtol=0)
    assert distillation_loss(ours, ours).abs() < 1e-6
    with pytest.raises(ValueError, match=r"student_logits \(3, 5, 11\)"):
        distillation_loss(ours, theirs[:2])
    with pytest.raises(ValueError, match="temperature=0"):
        distillation_loss(ours, theirs, 0)
