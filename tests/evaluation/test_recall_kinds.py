"""Facts of many kinds in real texts: what is asked can be known from far back alone, and answers are counted."""

import json
import random

import pytest
import torch
from _lib.documents import train_tokenizer

from hf_hybrid_ssm.evaluation.recall_tasks.kinds import HELD_IN, HELD_OUT, KINDS
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import answers_of, kinds_table
from hf_hybrid_ssm.evaluation.recall_tasks.real_texts import Asked, RealText, pieces_of, real_texts
from tests.students.teachers import SIZES, TEACHERS, student, teacher, tokens

WINDOW, LENGTH = 64, 400
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
PROSE = "\n".join(f"Line {n} of a long story. It went on and on, and nobody knew why." for n in range(300))


@pytest.fixture(scope="module")
def tokenizer():
    draw = random.Random(0)
    said = [fact for kind in KINDS.values() for _ in range(30) for fact in kind(draw).facts]
    return train_tokenizer([*PROSE.splitlines(), *said, "What is the <user> <assistant>?"], 1500)


@pytest.fixture
def files(tmp_path):
    prose, rows = tmp_path / "story.txt", tmp_path / "talk.jsonl"
    prose.write_text(PROSE, encoding="utf-8")
    talk = "\n".join(f"A{n}: Yes. " + "B: It was quiet there. " * 30 for n in range(60))
    rows.write_text("\n".join(json.dumps({"id": n, "dialogue": talk}) for n in range(3)), encoding="utf-8")
    return [prose, rows]


def test_no_kind_is_both_trained_and_judged():
    assert not HELD_IN.keys() & HELD_OUT.keys() and len(KINDS) == len(HELD_IN) + len(HELD_OUT) >= 10
    openings = {kind: KINDS[kind](random.Random(0)).facts[0].split()[1:] for kind in KINDS}
    for held_in in HELD_IN:
        for held_out in HELD_OUT:
            assert openings[held_in] != openings[held_out]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_stands_in_the_facts_alone(kind):
    draw, answers = random.Random(1), set()
    for _ in range(200):
        question = KINDS[kind](draw)
        (fact,) = question.facts
        assert fact.removesuffix(".").removesuffix(" from the catalogue").endswith(question.answer)
        for part in question.answer.split(" and grew up in "):
            assert part not in question.question and part not in question.prefix
        answers.add(question.answer)
    assert len(answers) > 10


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_facts_lie_beyond_the_window_of_a_real_text(template, tokenizer, files):
    tokenizer.chat_template = template
    texts = real_texts(tokenizer, files, LENGTH, count=4, window=WINDOW, seed=3)
    assert [len(text.asked) for text in texts] == [len(HELD_OUT)] * 4
    for index, text in enumerate(texts):
        shared = tokenizer.decode(text.shared[0])
        assert ("Line" in shared) == (index % 2 == 0)  # files take turns
        for asked in text.asked:
            length = text.shared.shape[1] + asked.ids.shape[1]
            assert LENGTH - 90 < length <= LENGTH
            assert torch.equal(asked.ids[0, -len(asked.answer) :], asked.answer)
            said = shared + tokenizer.decode(asked.ids[0])
            question = said.rindex("?")
            for part in tokenizer.decode(asked.answer).strip().split(" and grew up in "):
                end = shared.index(part) + len(part)
                assert len(tokenizer(said[end:question], add_special_tokens=False)["input_ids"]) > WINDOW
            assert said.startswith("<user>") == (template is not None) == ("<assistant>" in said)
    again = real_texts(tokenizer, files, LENGTH, count=4, window=WINDOW, seed=3)
    assert all(torch.equal(one.shared, other.shared) for one, other in zip(texts, again, strict=True))
    other = real_texts(tokenizer, files, LENGTH, count=1, window=WINDOW, seed=4)
    assert tokenizer.decode(other[0].shared[0]) != tokenizer.decode(texts[0].shared[0])


def test_long_lines_are_cut_at_sentences(files):
    pieces = pieces_of(str(files[1]))
    assert max(map(len, pieces)) < 100 and {piece[-1] for piece in pieces} == {" ", "\n"}


def test_what_cannot_be_asked_is_refused(tokenizer, files, tmp_path):
    ask = {"tokenizer": tokenizer, "files": files, "length": LENGTH, "count": 1, "window": WINDOW}
    with pytest.raises(ValueError, match=r"kinds=\['smell'\] are not among colour, "):
        real_texts(**ask | {"kinds": ["date", "smell"]})
    with pytest.raises(ValueError, match="too few: 302 are to follow them"):
        real_texts(**ask | {"window": 300})
    short, fields = tmp_path / "short.txt", tmp_path / "fields.jsonl"
    short.write_text("One.\nTwo.\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"short.txt has 2 lines and sentences; 100 are needed"):
        real_texts(**ask | {"files": [short]})
    fields.write_text('{"title": "A"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows with title, and none of text, document, dialogue"):
        real_texts(**ask | {"files": [fields]})


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("name", TEACHERS)
def test_an_answer_is_right_if_every_token_is_the_first_choice(name, windowed):
    """Read once for all questions, short and long ones, it is what the whole text gives; every teacher's cache can."""
    model = student(name, "constant") if windowed else teacher(name)
    shared, asked = tokens(1, 24), []
    for number in range(6):
        ids = tokens(1, 3 + number % 4, seed=number + 1)
        for _ in range(3):
            whole = torch.cat([shared, ids], 1)
            ids = torch.cat([ids, model(whole, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        if number % 3 == 1:
            ids[0, -2] = (ids[0, -2] + 1) % SIZES["vocab_size"]  # one token of three
        asked.append(Asked("date" if number < 4 else "place", ids, ids[0, -3:]))
    assert answers_of(model, [RealText(shared, tuple(asked))]) == {"date": "1011", "place": "01"}


def test_shares_are_of_what_the_teacher_finds():
    teacher = {"date": "11111111", "place": "110000000000"}
    student = {"date": "11110000", "place": "111111111111"}
    table = kinds_table({"teacher": {1024: teacher}, "half": {1024: student}})
    assert table.columns == [
        "model", "right of 20 in 1,024 tokens, 95 %", "of teacher's", "date, of 8", "place, of 12",
    ]  # fmt: skip
    assert table.rows[0] == ["teacher", "10 (30% to 70%)", "", "8", "2"]
    assert table.rows[1] == ["half", "16 (58% to 92%)", "60% (31% to 83%)", "4", "12"]
    with pytest.raises(ValueError, match="were asked different questions"):
        kinds_table({"teacher": {1024: teacher}, "half": {1024: {"date": "1" * 20}}})
