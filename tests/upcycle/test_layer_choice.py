"""Layers are ranked by what a teacher recalls with them, or by its distribution; chosen by count, share or list."""

import random
from dataclasses import replace

import pytest
import torch
from _lib.documents import train_tokenizer

from hf_hybrid_ssm.evaluation.recall_tasks.filler import sentences
from hf_hybrid_ssm.evaluation.recall_tasks.kinds import HELD_IN
from hf_hybrid_ssm.upcycle import (
    Keep,
    LayerChoice,
    Teacher,
    choice,
    choose_layers,
    probe_prompts,
    recall,
    upcycle,
    windowed_teacher,
)
from hf_hybrid_ssm.upcycle.choice import KEEP_BY
from hf_hybrid_ssm.upcycle.divergence import rank_layers_by_kl, rank_layers_by_sensitivity, text_of
from hf_hybrid_ssm.upcycle.layer_ranking import LayerRanking
from hf_hybrid_ssm.upcycle.probe_prompts import recall_prompts
from hf_hybrid_ssm.upcycle.recall import NoRecallError, rank_by_recall, recall_of
from hf_hybrid_ssm.upcycle.windowed_teacher import LayerReplay, maskable, window_mask, windowed_groups
from tests.upcycle.recalling_teacher import LAYERS, READS_PREVIOUS, RECALLS, VOCAB, recalling_teacher
from tests.upcycle.test_upcycle import EVERY, SIZES, teacher_of, tokens

WINDOW = 16


def recalling(**fields) -> Teacher:
    return Teacher(recalling_teacher(**fields))


def other(name="llama", **fields) -> Teacher:
    return Teacher(teacher_of(name, **fields))


def window_of_reference(length, window, sinks):
    return [[j <= i and (i - j <= window or j < sinks) for j in range(length)] for i in range(length)]


@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_a_window_holds_itself_those_before_and_the_first(sinks):
    assert window_mask(9, 3, sinks).tolist() == window_of_reference(9, 3, sinks)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@EVERY
@torch.no_grad()
def test_a_replay_is_the_forward_with_these_masks(name, implementation):
    """Against attention of which every layer is given its mask by hand; and logits of its hidden states are the
    model's."""
    teacher, inputs = other(name), tokens(2, 24)
    mask, (first, *_, last) = window_mask(24, 5), teacher.layers
    wanted = forward_with_masks(teacher, inputs, {first: mask, last: mask})
    own = teacher.model(inputs, use_cache=False).logits
    teacher.model.config._attn_implementation = implementation
    with maskable(teacher):
        for begun in ({}, {first: mask}, {last: mask}):
            replay = LayerReplay(teacher, inputs, begun)
            found = teacher.logits(replay.hidden_states({first: mask, last: mask}))
            torch.testing.assert_close(found, wanted, atol=3e-5, rtol=1e-5)
            torch.testing.assert_close(replay.hidden_states(begun), replay.base)
    assert teacher.model.config._attn_implementation == implementation
    torch.testing.assert_close(teacher.logits(replay.teachers_own), own, atol=3e-5, rtol=1e-5)
    assert not torch.allclose(own, wanted, atol=1e-3)


def forward_with_masks(teacher, inputs, masks):
    """Logits, by a hook on every windowed attention, which changes the scores' mask in an eager forward."""
    teacher.model.set_attn_implementation("eager")

    def window(mask):
        def change(module, args, kwargs):
            return args, kwargs | {
                "attention_mask": kwargs["attention_mask"] + torch.zeros(()).masked_fill(~mask, -1e9)
            }

        return change

    modules = {index: teacher.attention_of(index) for index in masks}
    hooks = [modules[i].register_forward_pre_hook(window(m), with_kwargs=True) for i, m in masks.items()]
    logits = teacher.model(inputs, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits


def test_groups_of_a_layer_are_windowed_alone():
    """Without their own value, the query heads of a group say nothing of a window; the other group's do."""
    teacher, inputs, mask = other(), tokens(1, 24), window_mask(24, 5)
    heads, kv_heads = teacher.config.num_attention_heads, teacher.config.num_key_value_heads
    assert (heads, kv_heads) == (4, 2)
    grouped = windowed_groups(mask, [1], heads, kv_heads)
    assert grouped[:2].equal(torch.ones(2, 24, 24, dtype=torch.bool).tril()) and grouped[2:].equal(
        mask.expand(2, -1, -1)
    )
    width = teacher.attention_of(2).head_dim
    with torch.no_grad(), maskable(teacher):
        replay = LayerReplay(teacher, inputs)
        both = replay.hidden_states({2: windowed_groups(mask, [0, 1], heads, kv_heads)})
        torch.testing.assert_close(both, replay.hidden_states({2: mask}))
        assert not torch.allclose(replay.hidden_states({2: grouped}), replay.base, atol=1e-4)
        teacher.attention_of(2).o_proj.weight[:, 2 * width :] = 0
        silenced = LayerReplay(teacher, inputs)
        torch.testing.assert_close(silenced.hidden_states({2: grouped}), silenced.base)


def test_layers_go_one_after_the_other():
    """A score is the difference of what the teacher recalls when windows are put on by hand, those that went included;
    no other layer that was left would have been missed less."""
    teacher = recalling()
    torch.manual_seed(1)
    for parameter in teacher.model.parameters():  # every layer has a say
        parameter.data += 0.013 * torch.randn_like(parameter)
    prompts = [
        replace(prompt, question=1) for prompt in recall_prompts(None, VOCAB, WINDOW, count=2)
    ]  # all is replayed
    ranking = rank_by_recall(teacher, window=WINDOW, prompts=prompts)
    gone = []
    while left := [layer for layer in range(LAYERS) if layer not in gone]:
        before = recall_of(teacher, prompts, WINDOW, gone).log_probability
        lost = {layer: before - recall_of(teacher, prompts, WINDOW, [*gone, layer]).log_probability for layer in left}
        least = min(left, key=lost.get)
        assert ranking.scores[least] == pytest.approx(lost[least], abs=1e-5)
        gone.append(least)
    assert ranking.layers == gone[::-1]


def test_many_layers_go_by_thirds(monkeypatch):
    """Of twelve the four least needed at once, then one at a time; of two that are needed alike the lower stays."""
    asked = []

    def lost(steps, endings, layers, windowed):
        asked.append(len(layers))
        return {layer: float(layer // 2) for layer in layers}

    monkeypatch.setattr(recall, "_lost", lost)
    teacher = recalling(num_hidden_layers=12)
    ranking = rank_by_recall(teacher, window=WINDOW)
    assert asked == [12, 8, 7, 6, 5, 4, 3, 2, 1]
    assert ranking.layers == [10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1]


@pytest.mark.parametrize("of_groups", [False, True])
@pytest.mark.parametrize("kept", [1, 3, 7, 10, 11])
def test_a_ranking_that_ends_early_keeps_the_same(of_groups, kept):
    """Also where it ends within a third; in fewer turns, and with a score of every part."""
    teacher, bars = recalling(num_hidden_layers=12), []
    torch.manual_seed(1)
    for parameter in teacher.model.parameters():
        parameter.data += 0.013 * torch.randn_like(parameter)
    prompts = recall_prompts(None, VOCAB, WINDOW, count=2)

    def ranked(**options):
        bars.clear()
        options |= {"progress": lambda steps: bars.append(len(steps)) or steps, "of_groups": of_groups}
        ranking = rank_by_recall(teacher, WINDOW, prompts, **options)
        return ranking, bars[-1]

    whole, steps = ranked()
    early, fewer = ranked(kept=kept)
    assert set(early.layers[:kept]) == set(whole.layers[:kept]) and fewer < steps
    assert early.layers[kept:] == whole.layers[kept:] and sorted(early.scores) == sorted(whole.scores)
    assert all(early.scores[part] == whole.scores[part] for part in whole.layers[kept:])
    with pytest.raises(ValueError, match=r"^kept=12 must be below 12, the parts that are ranked\.$"):
        ranked(kept=12)


@pytest.mark.parametrize("of_groups", [False, True])
def test_progress_is_shown_to_the_end_of_a_ranking(of_groups):
    """Two bars: the prompts as they are read, and as they are tried once for each turn; both come to their end."""
    bars = []

    def progress(sequence):
        bars.append([len(sequence), 0, False])
        for item in sequence:
            bars[-1][1] += 1
            yield item
        bars[-1][2] = True

    prompts = recall_prompts(None, VOCAB, WINDOW, count=2)
    given = {"window": WINDOW, "prompts": prompts, "of_groups": of_groups}
    ranking = rank_by_recall(recalling(), progress=progress, **given)
    forwards = sum(1 + left for left in range(1, LAYERS + 1))  # one key/value group a layer, one at a time
    assert bars == [[2, 2, True], [2 * forwards, 2 * forwards, True]]
    assert ranking == rank_by_recall(recalling(), **given)


@EVERY
@torch.no_grad()
def test_the_end_of_a_text_is_read_after_windows(name, monkeypatch):
    """Against one forward of the whole text: its start in windows in all layers, its end in some."""
    monkeypatch.setattr(windowed_teacher, "PIECE", 4)
    teacher, inputs, start = other(name), tokens(1, 24), 15
    mask, (first, *_, last) = window_mask(24, 5), teacher.layers
    ending = mask.clone()
    ending[start:] = torch.ones_like(mask).tril()[start:]
    prompt = recall.RecallPrompt(inputs, torch.tensor([20, 22]), start)
    with maskable(teacher):
        masks = dict.fromkeys(teacher.layers, ending) | {first: mask}
        states = LayerReplay(teacher, inputs, masks).base
        answers = torch.tensor([19, 21]), inputs[0, [20, 22]]
        wanted = teacher.logits(states)[0, answers[0]].log_softmax(-1).gather(1, answers[1][:, None])[:, 0]
        found = recall._Ending(teacher, prompt, 5, {})
        for parts in ([last], [last, first], [first]):  # what was run before leaves nothing
            found.compare_with(parts)
        torch.testing.assert_close(found.compare_with([first]), wanted, atol=2e-5, rtol=0)
        torch.testing.assert_close(found.compare_with([(first, g) for g in range(2)]), wanted, atol=2e-5, rtol=0)
        found.compare_with([])
        for parts in ([first], [last, first, (last, 0)]):  # alone, and in one row with others
            each = dict(zip(parts, found.without_each(parts)))
            torch.testing.assert_close(each[first], wanted, atol=2e-5, rtol=0)
        for part in parts[::2]:
            torch.testing.assert_close(found.compare_with([part]), each[part], atol=2e-5, rtol=0)


@EVERY
def test_layers_that_see_all_tokens_are_ranked(name, monkeypatch):
    """By each way; the teacher's own windows, and layers without attention, have no place in it."""
    monkeypatch.setattr(recall, "ENOUGH", 0.0)
    teacher, texts = other(name), [tokens(1, 20)]
    prompts = recall_prompts(None, SIZES["vocab_size"], 8, windows=3, count=1)
    rankings = [
        rank_by_recall(teacher, 8, prompts),
        rank_layers_by_kl(teacher, texts, 8),
        rank_layers_by_sensitivity(teacher, texts),
    ]
    for ranking in rankings:
        assert sorted(ranking.layers) == sorted(ranking.scores) == teacher.layers
    groups = rank_by_recall(teacher, 8, prompts, of_groups=True).layers
    assert sorted(groups) == [(layer, group) for layer in teacher.layers for group in range(2)]
    student, _ = upcycle(teacher, LayerChoice(groups[:1], "group_recall", window=8))
    kept = [(index, group) for index, layer in enumerate(student.config.plan.layers) for group in layer.groups]
    assert kept == groups[:1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_recall_needs_the_layer_that_was_made_for_it(seed):
    teacher = recalling()
    ranking = rank_by_recall(teacher, window=WINDOW, seed=seed)
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
    ranking = rank_layers_by_kl(recalling(), texts, WINDOW)
    assert ranking.layers[0] == RECALLS and ranking.scores[RECALLS] > 0.05
    assert max(abs(score) for layer, score in ranking.scores.items() if layer != RECALLS) < 1e-3


def test_sensitivity_is_the_loss_without_a_layers_attention():
    teacher, text = other(), tokens()
    model = teacher.model
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()  # adds nothing already
    rises = rank_layers_by_sensitivity(teacher, [text]).scores
    assert len(rises) == 4 and rises[2] == 0 and max(map(abs, rises.values())) > 1e-3
    with torch.no_grad():
        whole = model(text, labels=text).loss
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        without = model(text, labels=text).loss
    assert rises[1] == pytest.approx(float(without - whole), abs=1e-6)
    with pytest.raises(ValueError, match="texts is empty"):
        rank_layers_by_sensitivity(teacher, [])


def test_sensitivity_keeps_the_layers_that_the_teacher_misses_most(monkeypatch):
    scores = {0: 0.1, 1: 0.4, 2: -0.2, 3: 0.3}
    ranking = LayerRanking("sensitivity", [1, 3, 0, 2], scores)
    monkeypatch.setattr(choice, "rank_layers_by_sensitivity", lambda teacher, texts, progress: ranking)
    for parts, wanted in ((1, [1]), (0.5, [1, 3]), (3, [0, 1, 3])):
        found = choose_layers(recalling(), Keep(parts, "sensitivity", window=8))
        assert found.layers == wanted and found.ranking is ranking


def test_a_default_that_cannot_be_met_is_told_and_evenly_spaced(caplog):
    chosen = choose_layers(other(), Keep(2, window=8))
    assert chosen.layers == [1, 3] and chosen.by == "even" and chosen.window == 8
    assert "evenly spaced, not chosen by recall: the teacher recalls" in caplog.text


@pytest.mark.parametrize("by", [None, "recall", "even"])
def test_a_student_keeps_what_was_chosen(by):
    student, report = upcycle(recalling(), Keep(2, by, window=16))
    wanted = [1, 3] if by == "even" else [0, RECALLS]
    assert [i for i, layer in enumerate(student.config.plan.layers) if layer.attention == "full"] == wanted
    assert report.choice.layers == wanted and str(report).startswith(str(report.choice))


@torch.no_grad()
def test_a_student_keeps_single_groups():
    """One of eight groups recalls: the student with it, and windows elsewhere, recalls what its teacher does, and with
    windows alone nothing; its cache grows by that group's keys and values."""
    teacher = recalling(num_attention_heads=2, num_key_value_heads=2)
    student, report = upcycle(teacher, Keep(1, "group_recall", window=WINDOW))
    assert report.choice.layers == [(RECALLS, 0)] and report.choice.by == "group_recall"
    assert report.choice.kept.right > 0.9 and not report.dropped
    assert [layer.groups for layer in student.config.plan.layers] == [(), (), (0,), ()]
    right, count, cached = {}, 0, {}
    models = {"groups": student, "windows": upcycle(teacher, Keep([], window=WINDOW))[0]}
    for prompt in recall_prompts(None, VOCAB, WINDOW, seed=7):
        wanted = prompt.input_ids[0, prompt.positions]
        count += len(wanted)
        for name, model in models.items():
            output = model(prompt.input_ids, use_cache=True)
            right[name] = right.get(name, 0) + int((output.logits[0].argmax(-1)[prompt.positions - 1] == wanted).sum())
            states = [state for layer in output.cache.layers for state in layer.states.values()]
            cached[name] = sum(state.numel() for state in states if state.dim() == 4)
    assert right["groups"] > 0.9 * count and right["windows"] < 0.3 * count
    length, size = prompt.input_ids.shape[1], student.config.head_dim
    assert cached["groups"] - cached["windows"] == 2 * size * (length - WINDOW)


def test_all_groups_of_a_layer_are_the_layer():
    teacher = other()
    layer, groups = (upcycle(teacher, Keep(parts, window=8))[0].config for parts in ([1], [(1, 0), (1, 1)]))
    assert layer.plan == groups.plan


def test_a_ranking_is_the_same_for_the_same_seed():
    teacher = recalling()
    assert rank_by_recall(teacher, window=WINDOW) == rank_by_recall(teacher, window=WINDOW)
    texts = [text_of(teacher, 2, 40, seed) for seed in (0, 0, 1)]
    assert texts[0].equal(texts[1]) and not texts[0].equal(texts[2])
    assert texts[0].shape == (2, 40)


def test_a_teacher_without_recall_is_told_so():
    for by in ("recall", "group_recall"):
        with pytest.raises(NoRecallError, match=r'the teacher recalls .*% of the tokens.*is noise. Choose by "kl"'):
            choose_layers(other(), Keep(2, by, window=8))
    assert choose_layers(other(), Keep(2, "even")).layers == [1, 3]


def test_what_is_kept_is_checked_together():
    teacher = recalling()
    found = choose_layers(teacher, Keep(1, window=WINDOW))
    assert found.layers == [RECALLS] and found.kept == found.teacher and found.teacher.right > 0.9
    assert "kept (recall): 2\n" in str(found) and found.window == WINDOW
    assert choose_layers(teacher, Keep(1, window=WINDOW), is_tried=False) == replace(found, teacher=None, kept=None)
    texts = [prompt.input_ids for prompt in recall_prompts(None, VOCAB, WINDOW, windows=2)]
    assert rank_layers_by_kl(teacher, texts, WINDOW).layers[0] == RECALLS
    assert sorted(rank_layers_by_sensitivity(teacher, texts).layers[:2]) == [READS_PREVIOUS, RECALLS]


@pytest.mark.parametrize(
    ("parts", "by", "layers"),
    [
        ([3, 0, 3], None, [0, 3]),
        ([(3, 0), [0, 0], (3, 0)], None, [(0, 0), (3, 0)]),
        (4, "group_recall", [(0, 0), (1, 0), (2, 0), (3, 0)]),
        (2, "even", [1, 3]),
        (0.25, "even", [2]),
        (0, "recall", []),
        (1.0, "kl", [0, 1, 2, 3]),
    ],
)
def test_counts_shares_and_lists(parts, by, layers):
    assert choose_layers(recalling(), Keep(parts, by)).layers == layers


@pytest.mark.parametrize("by", KEEP_BY)
@pytest.mark.parametrize("parts", [[3], [(3, 0)], ()])
def test_a_list_is_not_ranked(parts, by):
    with pytest.raises(ValueError, match=f"by='{by}' chooses a count or share of layers, got the list parts="):
        Keep(parts, by)


def test_counts_are_of_layers_that_see_all_tokens():
    """Of Gemma's four layers here two do."""
    teacher = other("gemma3")
    assert teacher.layers == [1, 3]
    assert choose_layers(teacher, Keep(0.5, "even")).layers == [3]
    assert choose_layers(teacher, Keep(2)).layers == [1, 3]
    with pytest.raises(ValueError, match="count between 0 and 2"):
        choose_layers(teacher, Keep(3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": 5}, "count between 0 and 4"),
        ({"parts": -1}, "count between 0 and 4"),
        ({"parts": 1.5}, "share between 0 and 1"),
        ({"parts": [4]}, "names 4, but the teacher sees all tokens in the layers 0, 1, 2, 3"),
        ({"parts": [1.5, "a"]}, r"names 1\.5, but"),
        ({"parts": [(1, 0), 2]}, "names layers and key/value groups: give one kind"),
        ({"parts": [(1, 2), (0, 0, 0)]}, r"names 0:0:0, but .*the key/value groups 0 to 0"),
        ({"parts": 5, "by": "group_recall"}, "count between 0 and 4, the teacher's key/value groups"),
        ({"parts": 0, "by": "group_recall"}, "keeps none of 4 key/value groups"),
        ({"parts": 1, "by": "luck"}, "'recall', 'group_recall', 'kl', 'sensitivity', 'even'"),
        ({"parts": 1, "window": 0}, "window=0 must be a number of tokens"),
        ({"parts": 1, "window": 8.0}, "window=8.0 must be a number of tokens"),
        ({"parts": True}, "parts=True must be a count"),
        ({"parts": "all"}, "parts='all' must be a count"),
    ],
)
def test_misuse_is_named(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        choose_layers(recalling(), Keep(**options))


def test_texts_that_a_window_shows_whole_are_refused():
    with pytest.raises(ValueError, match="texts have 9 tokens"):
        rank_layers_by_kl(recalling(), [torch.zeros(1, 9, dtype=torch.long)], 8)
    with pytest.raises(ValueError, match="texts is empty"):
        rank_layers_by_kl(recalling(), [])


def test_prompts_are_within_the_positions_of_the_teacher():
    with pytest.raises(NoRecallError, match=r"window=1000 makes prompts of 7064 tokens.*max_position_embeddings=1024"):
        rank_by_recall(recalling(), window=1000)


@pytest.mark.parametrize(("window", "windows"), [(32, 8), (400, 3), (8, 2)])
def test_prompts_of_sentences_share_their_texts(window, windows, monkeypatch):
    """Seven kinds of facts, each asked for by itself; the text is read once, however short the window."""
    draw = random.Random(0)
    said = [fact for kind in HELD_IN.values() for _ in range(20) for fact in kind(draw).facts]
    tokenizer = train_tokenizer([*(next(filler) for filler in [sentences(draw)] * 300), *said], 900)
    monkeypatch.setattr(probe_prompts, "LEAST_WORDS", 0)
    prompts = recall_prompts(tokenizer, 900, window, windows)
    assert len(prompts) == 14 and len(recall_prompts(tokenizer, 900, window, windows, count=8)) == 8
    texts = {tuple(prompt.input_ids[0, : prompt.question].tolist()) for prompt in prompts}
    assert len(texts) == 2 and len({tuple(prompt.input_ids[0].tolist()) for prompt in prompts}) == 14
    for prompt in prompts:
        ids, answer = prompt.input_ids[0], tokenizer.decode(prompt.input_ids[0, prompt.positions])
        assert prompt.positions[-1] == len(ids) - 1 and prompt.question < prompt.positions[0]
        text = tokenizer.decode(ids[: prompt.question])
        after = tokenizer(text[text.index(answer.strip()) + len(answer.strip()) :], add_special_tokens=False)[
            "input_ids"
        ]
        assert len(after) >= window
    teacher, read = other(max_position_embeddings=8192), []
    in_windows = recall.ReadText.in_windows
    monkeypatch.setattr(recall.ReadText, "in_windows", lambda *given: read.append(0) or in_windows(*given))
    monkeypatch.setattr(recall, "ENOUGH", 0.0)
    short = [replace(prompt, input_ids=prompt.input_ids % SIZES["vocab_size"]) for prompt in prompts]
    assert sorted(rank_by_recall(teacher, window, short).layers) == teacher.layers and len(read) == 2


def test_facts_are_bounded_by_the_vocabulary():
    assert len(recall_prompts(None, 16, WINDOW)[0].positions) == 6  # two facts
    with pytest.raises(ValueError, match="vocab_size=7 leaves 7 tokens: 4 for a key and its value"):
        recall_prompts(None, 7, WINDOW)
