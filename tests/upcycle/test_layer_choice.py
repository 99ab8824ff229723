"""Layers are ranked by what a teacher recalls with them, or by its distribution; chosen by count, share or list."""

from dataclasses import replace

import pytest
import torch

from hf_hybrid_ssm.models.cache_names import CACHE
from hf_hybrid_ssm.upcycle import (
    NoRecallError,
    choice,
    choose_layers,
    rank_groups_by_recall,
    rank_layers_by_kl,
    rank_layers_by_recall,
    recall,
    recall_of,
    recall_prompts,
    upcycle,
)
from hf_hybrid_ssm.upcycle.divergence import text_of
from hf_hybrid_ssm.upcycle.windowed_teacher import (
    LayerReplay,
    ReadText,
    maskable,
    window_mask,
    windowed_groups,
    windowed_layers,
)
from tests.upcycle.recalling_teacher import LAYERS, READS_PREVIOUS, RECALLS, VOCAB, recalling_teacher
from tests.upcycle.test_upcycle import TEACHERS, teacher_of, tokens

WINDOW = 16


def window_of_reference(length, window, sinks):
    return [[j <= i and (i - j <= window or j < sinks) for j in range(length)] for i in range(length)]


@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_a_window_holds_itself_those_before_and_the_first(sinks):
    assert window_mask(9, 3, sinks).tolist() == window_of_reference(9, 3, sinks)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("name", TEACHERS)
def test_a_replay_is_the_forward_with_these_masks(name, implementation):
    """Against attention of which every layer is given its mask by hand."""
    teacher, inputs = teacher_of(name), tokens(2, 24)
    mask = window_mask(24, 5)
    wanted = forward_with_masks(teacher, inputs, {1: mask, 3: mask})
    teacher.config._attn_implementation = implementation
    with maskable(teacher), torch.no_grad():
        for first in ({}, {0: mask}, {2: mask, 3: mask}):
            replay = LayerReplay(teacher, inputs, first)
            torch.testing.assert_close(replay.hidden_states({1: mask, 3: mask}), wanted, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(replay.hidden_states(first), replay.base)
    assert teacher.config._attn_implementation == implementation
    assert not torch.allclose(replay.teachers_own, wanted, atol=1e-3)


def forward_with_masks(teacher, inputs, masks):
    """By a hook on every windowed attention, which changes the scores' mask in an eager forward."""
    teacher.set_attn_implementation("eager")

    def window(mask):
        def change(module, args, kwargs):
            return args, kwargs | {
                "attention_mask": kwargs["attention_mask"] + torch.zeros(()).masked_fill(~mask, -1e9)
            }

        return change

    layers = teacher.model.layers
    hooks = [layers[i].self_attn.register_forward_pre_hook(window(m), with_kwargs=True) for i, m in masks.items()]
    with torch.no_grad():
        states = teacher.model(inputs, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    return states


def test_groups_of_a_layer_are_windowed_alone():
    """Without their own value, the query heads of a group say nothing of a window; the other group's do."""
    teacher, inputs, mask = teacher_of("llama"), tokens(1, 24), window_mask(24, 5)
    heads, kv_heads = teacher.config.num_attention_heads, teacher.config.num_key_value_heads
    assert (heads, kv_heads) == (4, 2)
    grouped = windowed_groups(mask, [1], heads, kv_heads)
    assert grouped[:2].equal(torch.ones(2, 24, 24, dtype=torch.bool).tril()) and grouped[2:].equal(
        mask.expand(2, -1, -1)
    )
    width = teacher.model.layers[2].self_attn.head_dim
    with torch.no_grad(), maskable(teacher):
        replay = LayerReplay(teacher, inputs)
        both = replay.hidden_states({2: windowed_groups(mask, [0, 1], heads, kv_heads)})
        torch.testing.assert_close(both, replay.hidden_states({2: mask}))
        assert not torch.allclose(replay.hidden_states({2: grouped}), replay.base, atol=1e-4)
        teacher.model.layers[2].self_attn.o_proj.weight[:, 2 * width :] = 0
        silenced = LayerReplay(teacher, inputs)
        torch.testing.assert_close(silenced.hidden_states({2: grouped}), silenced.base)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_windowed_layers_are_those_of_a_replay(implementation):
    """Padding on the right changes nothing; a cache is refused; afterwards the teacher is what it was."""
    teacher, inputs, mask = teacher_of("qwen3"), tokens(2, 24), window_mask(24, 5)
    with maskable(teacher), torch.no_grad():
        wanted = LayerReplay(teacher, inputs).hidden_states({1: mask, 2: mask})
    teacher.config._attn_implementation = implementation
    with windowed_layers(teacher, [2, 1], 5), torch.no_grad():
        torch.testing.assert_close(teacher.model(inputs, use_cache=False).last_hidden_state, wanted)
        padded = torch.nn.functional.pad(inputs, (0, 6))
        torch.testing.assert_close(teacher.model(padded, use_cache=False).last_hidden_state[:, :24], wanted)
        whole = teacher.model(inputs, use_cache=True)
        torch.testing.assert_close(whole.last_hidden_state, wanted)
        with pytest.raises(ValueError, match="cannot go on from a cache"):
            teacher(inputs, **{CACHE: whole[CACHE]})
    assert teacher.config._attn_implementation == implementation
    assert not any(layer._forward_pre_hooks for layer in teacher.model.layers)


def test_layers_go_one_after_the_other():
    """A score is the difference of what the teacher recalls when windows are put on by hand, those that went included;
    no other layer that was left would have been missed less."""
    teacher = recalling_teacher()
    torch.manual_seed(1)
    for parameter in teacher.parameters():  # every layer has a say
        parameter.data += 0.013 * torch.randn_like(parameter)
    prompts = [
        replace(prompt, question=1) for prompt in recall_prompts(None, VOCAB, WINDOW, count=2)
    ]  # all is replayed
    ranking = rank_layers_by_recall(teacher, window=WINDOW, prompts=prompts)
    gone = []
    while left := [layer for layer in range(LAYERS) if layer not in gone]:
        before = recall_of(teacher, prompts, WINDOW, gone).log_probability
        lost = {layer: before - recall_of(teacher, prompts, WINDOW, [*gone, layer]).log_probability for layer in left}
        least = min(left, key=lost.get)
        assert ranking.scores[least] == pytest.approx(lost[least], abs=1e-5)
        gone.append(least)
    assert ranking.layers == gone[::-1]


def test_groups_go_one_after_the_other():
    """As layers do; `recall_of` puts windows on groups."""
    teacher = recalling_teacher(num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(1)
    for parameter in teacher.parameters():
        parameter.data += 0.013 * torch.randn_like(parameter)
    prompts = [replace(prompt, question=1) for prompt in recall_prompts(None, VOCAB, WINDOW, count=2)]
    ranking = rank_groups_by_recall(teacher, window=WINDOW, prompts=prompts)
    assert ranking.by == "group_recall" and ranking.layers[0] == (RECALLS, 0) and len(ranking.layers) == 2 * LAYERS

    def recalled(windowed):
        return recall_of(teacher, prompts, WINDOW, windowed).log_probability

    gone = []
    while left := [part for part in sorted(ranking.layers) if part not in gone]:
        lost = {part: recalled(gone) - recalled([*gone, part]) for part in left}
        gone.append(min(left, key=lost.get))
        assert ranking.scores[gone[-1]] == pytest.approx(lost[gone[-1]], abs=1e-5)
    assert ranking.layers == gone[::-1]
    assert f"group {RECALLS}:0" in str(ranking).splitlines()[2]


def test_groups_after_a_text_in_windows_are_those_of_whole_layers():
    """All groups of a layer windowed are the layer windowed, where the start of the prompt is read in windows too."""
    teacher = recalling_teacher(num_attention_heads=2, num_key_value_heads=2)
    assert rank_groups_by_recall(teacher, window=WINDOW).layers[0] == (RECALLS, 0)
    assert rank_layers_by_recall(teacher, window=WINDOW).layers[0] == RECALLS


def test_many_layers_go_by_thirds(monkeypatch):
    """Of twelve the four least needed at once, then one at a time; of two that are needed alike the lower stays."""
    asked = []

    def lost(endings, layers, windowed):
        asked.append(len(layers))
        return {layer: float(layer // 2) for layer in layers}

    monkeypatch.setattr(recall, "_lost", lost)
    teacher = recalling_teacher(num_hidden_layers=12)
    ranking = rank_layers_by_recall(teacher, window=WINDOW)
    assert asked == [12, 8, 7, 6, 5, 4, 3, 2, 1]
    assert ranking.layers == [10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1]


@pytest.mark.parametrize("rank", [rank_layers_by_recall, rank_groups_by_recall])
def test_progress_is_shown_to_the_end_of_a_ranking(rank):
    """Two bars: the prompts as they are read, and as they are tried once for each turn; both come to their end."""
    bars = []

    def progress(sequence):
        bars.append([len(sequence), 0, False])
        for item in sequence:
            bars[-1][1] += 1
            yield item
        bars[-1][2] = True

    prompts = recall_prompts(None, VOCAB, WINDOW, count=2)
    ranking = rank(recalling_teacher(), window=WINDOW, prompts=prompts, progress=progress)
    assert bars == [[2, 2, True], [2 * LAYERS, 2 * LAYERS, True]]  # one key/value group a layer, one at a time
    assert ranking == rank(recalling_teacher(), window=WINDOW, prompts=prompts)


@pytest.mark.parametrize("name", TEACHERS)
def test_the_end_of_a_text_is_read_after_windows(name):
    """Against one forward of the whole text: its start in windows in all layers, its end in some."""
    teacher, inputs, start = teacher_of(name), tokens(2, 24), 15
    mask = window_mask(24, 5)
    ending = mask.clone()
    ending[start:] = torch.ones_like(mask).tril()[start:]
    with maskable(teacher), torch.no_grad():
        wanted = LayerReplay(teacher, inputs, {0: mask, 1: ending, 2: mask, 3: ending})
        past = ReadText.in_windows(teacher, inputs[:, :start], 5)
        replay = LayerReplay(teacher, inputs[:, start:], past=past)
        own = window_mask(24, 5, first=start)
        for masks in ({0: own}, {2: own, 0: own}, {1: own}):  # what was run before leaves nothing
            found = replay.hidden_states(masks)
        found = replay.hidden_states({0: own, 2: own})
    torch.testing.assert_close(found, wanted.base[:, start:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_recall_needs_the_layer_that_was_made_for_it(seed):
    teacher = recalling_teacher()
    ranking = rank_layers_by_recall(teacher, window=WINDOW, seed=seed)
    assert ranking.layers[0] == RECALLS and ranking.teacher.right > 0.9
    assert ranking.scores[RECALLS] > 1
    assert max(abs(score) for layer, score in ranking.scores.items() if layer != RECALLS) < 1e-3
    assert f"layer {RECALLS}" in str(ranking).splitlines()[2]
    prompts = recall_prompts(None, VOCAB, WINDOW, seed=seed + 1)
    others = [layer for layer in range(LAYERS) if layer != RECALLS]
    assert recall_of(teacher, prompts, WINDOW, others) == recall_of(teacher, prompts, WINDOW)
    assert recall_of(teacher, prompts, WINDOW, [RECALLS]).right < 0.3
    assert recall_of(teacher, prompts, 16 * WINDOW, [RECALLS]).right > 0.9  # the window holds the prompt


@pytest.mark.parametrize("seed", [0, 1])
def test_the_distribution_needs_it_too(seed):
    texts = [prompt.input_ids for prompt in recall_prompts(None, VOCAB, WINDOW, seed=seed)]
    ranking = rank_layers_by_kl(recalling_teacher(), texts, WINDOW)
    assert ranking.layers[0] == RECALLS and ranking.scores[RECALLS] > 0.05
    assert max(abs(score) for layer, score in ranking.scores.items() if layer != RECALLS) < 1e-3


def test_sensitivity_keeps_the_layers_that_the_teacher_misses_most(monkeypatch):
    monkeypatch.setattr(choice, "attention_sensitivity", lambda teacher, batches: [0.1, 0.4, -0.2, 0.3])
    for keep, wanted in ((1, [1]), (0.5, [1, 3]), (3, [0, 1, 3])):
        found = choose_layers(recalling_teacher(), keep, "sensitivity", texts=[torch.zeros(1, 9, dtype=torch.long)])
        assert found.layers == wanted and list(found.ranking.scores.values()) == [0.1, 0.4, -0.2, 0.3]


def test_a_default_that_cannot_be_met_is_told_and_evenly_spaced(caplog):
    chosen = choose_layers(teacher_of("llama"), 2, window=8)
    assert chosen.layers == [1, 3] and chosen.by == "even"
    assert "evenly spaced, not chosen by recall: the teacher recalls" in caplog.text


@pytest.mark.parametrize("keep_by", [None, "recall", "even"])
def test_a_student_keeps_what_was_chosen(keep_by):
    student, report = upcycle(recalling_teacher(), 2, init="random", keep_by=keep_by, sliding_window=16)
    wanted = [1, 3] if keep_by == "even" else [0, RECALLS]
    assert [i for i, kind in enumerate(student.config.block_types) if kind != "linear_attention"] == wanted
    assert report.choice.layers == wanted and str(report).startswith(str(report.choice))


@torch.no_grad()
def test_a_student_keeps_single_groups():
    """One of eight groups recalls: the student with it, and windows elsewhere, recalls what its teacher does, and with
    windows alone nothing; its cache grows by that group's keys and values."""
    teacher = recalling_teacher(num_attention_heads=2, num_key_value_heads=2)
    student, report = upcycle(teacher, 1, keep_by="group_recall", sliding_window=WINDOW + 1)
    assert report.choice.layers == [(RECALLS, 0)] and report.choice.by == "group_recall"
    assert report.choice.kept.right > 0.9 and not report.dropped and not report.translated
    config = student.config
    assert config.block_types == ["sliding_attention"] * 2 + ["mixed_attention", "sliding_attention"]
    assert config.full_attention_groups == [[], [], [0], []]
    right, count, cached = {}, 0, {}
    models = {"groups": student, "windows": upcycle(teacher, [], others_as="sliding_attention", sliding_window=17)[0]}
    for prompt in recall_prompts(None, VOCAB, WINDOW, seed=7):
        wanted = prompt.input_ids[0, prompt.positions]
        count += len(wanted)
        for name, model in models.items():
            output = model(prompt.input_ids, use_cache=True)
            right[name] = right.get(name, 0) + int((output.logits[0].argmax(-1)[prompt.positions - 1] == wanted).sum())
            states = [state for layer in output.cache.layers for state in layer.states.values()]
            cached[name] = sum(state.numel() for state in states if state.dim() == 4)
    assert right["groups"] > 0.9 * count and right["windows"] < 0.3 * count
    length, size = prompt.input_ids.shape[1], config.head_dim
    assert cached["groups"] - 2 * 8 * size * WINDOW == 2 * size * (length - WINDOW)


def test_groups_that_cannot_be_kept_are_named():
    teacher = teacher_of("llama")
    for fields, words in (
        ({"others_as": "hybrid_sliding"}, "others_as='hybrid_sliding': key/value groups that are kept have full"),
        ({"keep_as": "sliding_attention"}, "keep_as='sliding_attention', others_as=None: key/value groups"),
    ):
        with pytest.raises(ValueError, match=words):
            upcycle(teacher, keep=[(0, 1)], **fields)
    with pytest.raises(ValueError, match="attention of the teacher has a window: give whole layers"):
        upcycle(teacher_of("mistral"), keep=[(0, 1)])
    whole, groups = upcycle(teacher, keep=[1], others_as="sliding_attention"), upcycle(teacher, keep=[(1, 0), (1, 1)])
    assert groups[0].config.to_dict() == whole[0].config.to_dict()


def test_a_block_state_transformer_has_no_choice():
    with pytest.raises(ValueError, match="keep_by='recall' is for Longhorn"):
        upcycle(recalling_teacher(), family="bst", keep_by="recall")


def test_without_texts_the_teacher_writes_them():
    teacher = teacher_of("qwen2")
    texts = [text_of(teacher, 4, 24, 5)]
    assert rank_layers_by_kl(teacher, window=8, seed=5) == rank_layers_by_kl(teacher, texts, 8)


def test_a_ranking_is_the_same_for_the_same_seed():
    teacher = recalling_teacher()
    assert rank_layers_by_recall(teacher, window=WINDOW) == rank_layers_by_recall(teacher, window=WINDOW)
    texts = [text_of(teacher, 2, 40, seed) for seed in (0, 0, 1)]
    assert texts[0].equal(texts[1]) and not texts[0].equal(texts[2])
    assert texts[0].shape == (2, 40)


def test_a_teacher_without_recall_is_told_so():
    with pytest.raises(ValueError, match=r'the teacher recalls .*% of the tokens.*keep_by="kl"'):
        rank_layers_by_recall(teacher_of("llama"), window=8)
    with pytest.raises(NoRecallError, match="ranking is noise"):
        rank_groups_by_recall(teacher_of("llama"), window=8)
    assert choose_layers(teacher_of("llama"), 2, "even").layers == [1, 3]


def test_what_is_kept_is_checked_together():
    teacher = recalling_teacher()
    choice = choose_layers(teacher, 1, window=WINDOW)
    assert choice.layers == [RECALLS] and choice.kept == choice.teacher and choice.teacher.right > 0.9
    assert "kept (recall): 2\n" in str(choice)
    texts = [prompt.input_ids for prompt in recall_prompts(None, VOCAB, WINDOW, windows=2)]
    assert choose_layers(teacher, 0.25, "kl", texts=texts, window=WINDOW).layers == [RECALLS]
    assert choose_layers(teacher, 2, "sensitivity", texts=texts).layers == [READS_PREVIOUS, RECALLS]


@pytest.mark.parametrize(
    ("keep", "keep_by", "layers"),
    [
        ([3, 0, 3], "recall", [0, 3]),
        ([(3, 0), [0, 0], (3, 0)], None, [(0, 0), (3, 0)]),
        (4, "group_recall", [(0, 0), (1, 0), (2, 0), (3, 0)]),
        (2, "even", [1, 3]),
        (0.25, "even", [2]),
        (0, "recall", []),
        (1.0, "kl", [0, 1, 2, 3]),
    ],
)
def test_counts_shares_and_lists(keep, keep_by, layers):
    assert choose_layers(recalling_teacher(), keep, keep_by).layers == layers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 5}, "count between 0 and 4"),
        ({"keep": -1}, "count between 0 and 4"),
        ({"keep": 1.5}, "share between 0 and 1"),
        ({"keep": [4]}, r"names \[4\]"),
        ({"keep": [1.5, "a"]}, r"names \[1.5, 'a'\]"),
        ({"keep": [(1, 0), 2]}, "names layers and key/value groups: give one kind"),
        ({"keep": [(1, 2), (0, 0, 0)]}, r"names \[\(0, 0, 0\), \(1, 2\)\].*the key/value groups 0 to 0"),
        ({"keep": 5, "keep_by": "group_recall"}, "count between 0 and 4, the teacher's key/value groups"),
        ({"keep": 0, "keep_by": "group_recall"}, "keeps none of 4 key/value groups"),
        ({"keep": 1, "keep_by": "luck"}, "'recall', 'group_recall', 'kl', 'sensitivity', 'even'"),
        ({"keep": 1, "window": 0}, "window=0"),
        ({"keep": 1, "keep_by": "kl", "window": 8, "texts": [torch.zeros(1, 9, dtype=torch.long)]}, "texts have 9"),
        ({"keep": 1, "keep_by": "kl", "texts": []}, "texts is empty"),
    ],
)
def test_misuse_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        choose_layers(recalling_teacher(), **options)


def test_prompts_are_within_the_positions_of_the_teacher():
    with pytest.raises(NoRecallError, match=r"window=1000 makes prompts of 7064 tokens.*max_position_embeddings=1024"):
        rank_layers_by_recall(recalling_teacher(), window=1000)


def test_facts_are_bounded_by_the_vocabulary():
    with pytest.raises(ValueError, match="facts=9 must be at most 8"):
        recall_prompts(None, VOCAB, WINDOW, facts=9)
