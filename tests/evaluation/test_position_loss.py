"""Loss by position, in pieces; what a model writes, scored by another; intervals of shares."""

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.evaluation import loss_by_position, mean_by_position, teacher_scored_generation, wilson_interval
from hf_hybrid_ssm.planning.measurement import cache_bytes
from tests.tiny_models import config_of, language_model, own_language_model

MODELS = ("longhorn", "bst sh s4d", "student: windows and a full layer")


def teacher():
    return language_model("student: groups")


def text(rows=2, length=41):
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("piece", [1, 7, 40, 64])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_give_the_loss_of_the_whole(name, piece):
    model, ids = language_model(name), text()
    with torch.no_grad():
        wanted = F.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(loss_by_position(model, ids, piece), wanted, atol=1e-5, rtol=1e-5)


def test_what_is_remembered_of_a_long_text_is_bounded(monkeypatch):
    model, sizes = own_language_model("bst sh s4d"), []
    forward = model.forward

    def watched(*given, **named):
        output = forward(*given, **named)
        sizes.append((output.logits.shape[1], cache_bytes(output.past_key_values)))
        return output

    monkeypatch.setattr(model, "forward", watched)
    loss_by_position(model, text(1, 201), 20)
    assert len(sizes) == 10 and max(length for length, _ in sizes) == 20
    assert len({size for _, size in sizes[1:]}) == 1


def test_the_mode_of_a_model_stays():
    model = own_language_model("bst sh s4d").train()
    loss_by_position(model, text())
    teacher_scored_generation(model, teacher(), text(), 2)
    assert model.training


def test_means_between_positions():
    losses = torch.arange(1.0, 9.0)[None].expand(2, -1)  # position t has loss t
    assert mean_by_position(losses, [1, 3, 4, 9]) == {"1-3": 1.5, "3-4": 3.0, "4-9": 6.0}
    for edges, words in (([1, 10], "beyond the 9 tokens"), ([3, 2], "ascending"), ([0, 2], "from 1 on"), ([1], "two")):
        with pytest.raises(ValueError, match=words):
            mean_by_position(losses, edges)


@pytest.mark.parametrize("seed", [None, 3])
def test_the_teacher_scores_what_a_model_writes(seed):
    """Against generate() and one forward; drawn alike for one seed, otherwise not."""
    student, prompts = language_model("longhorn"), text(2, 5)
    found = teacher_scored_generation(student, teacher(), prompts, 12, seed)
    assert found.shape == (2, 12)
    assert torch.equal(found, teacher_scored_generation(student, teacher(), prompts, 12, seed))
    if seed is None:
        written = student.generate(prompts, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.no_grad():
            logits = teacher()(written).logits[:, 4:-1]
        wanted = F.cross_entropy(logits.transpose(1, 2), written[:, 5:], reduction="none")
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    else:
        assert not torch.equal(found, teacher_scored_generation(student, teacher(), prompts, 12, seed + 1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: loss_by_position(teacher(), text()[0]), r"input_ids \(41,\)"),
        (lambda: loss_by_position(teacher(), text(2, 1)), r"input_ids \(2, 1\)"),
        (lambda: loss_by_position(teacher(), text(), 0), "piece=0"),
        (lambda: teacher_scored_generation(teacher(), teacher(), text(), 0), "new_tokens=0"),
        (lambda: wilson_interval(3, 2), "right=3"),
        (lambda: wilson_interval(0, 0), "count=0"),
    ],
)
def test_misuse_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_vocabularies_must_agree():
    other = AutoModelForCausalLM.from_config(config_of("longhorn", vocab_size=41))
    with pytest.raises(ValueError, match="vocab_size=61 of the model and 41"):
        teacher_scored_generation(teacher(), other, text(), 1)


@pytest.mark.parametrize(("right", "count"), [(0, 60), (1, 60), (30, 60), (54, 60), (60, 60), (1, 2)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_intervals_are_wilsons(right, count, confidence):
    wanted = binomtest(right, count).proportion_ci(confidence, method="wilson")
    assert wilson_interval(right, count, confidence) == pytest.approx((wanted.low, wanted.high), abs=1e-12)
