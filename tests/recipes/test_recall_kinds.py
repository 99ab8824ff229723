"""Recall of kinds: what was asked is not asked again; a training that is stopped goes on to the same student."""

import dataclasses
import json
import random

import pytest
import torch
from _lib.documents import train_tokenizer
from recall_kinds import RecallKindsArguments, measure
from recall_training import RecallRows, RecallTrainingArguments, train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_hybrid_ssm.evaluation.recall_tasks.kinds import HELD_IN, HELD_OUT, KINDS
from tests.recipes import small

WINDOW = 32
HELD_OUT_WORDS = ("#define", "was born", "label", "is kept in", "was called", "keeps a")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
KEPT = [[0, 0], [0, 1], [1, 0]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall")
    story = "\n".join(f"Line {n} of a story that went on and on for a long time without any end." for n in range(200))
    (folder / "story.txt").write_text(story, encoding="utf-8")
    (folder / "texts.jsonl").write_text(json.dumps({"text": story}), encoding="utf-8")
    draw = random.Random(0)
    said = [fact for kind in KINDS.values() for _ in range(30) for fact in kind(draw).facts]
    tokenizer = train_tokenizer([*story.splitlines(), *said], 1200)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, initializer_range=0.4, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    return folder


def measuring(place, output, **options):
    given = {"students": {"all": {"keep": [0, 1]}, "none": {}}, "lengths": [400], "texts": 2, "window": WINDOW}
    given |= {"loss_files": [str(place / "texts.jsonl")], "loss_texts": 1, "edges": [8, 32, 128]}
    given |= {"dtype": "float32", "cache_lengths": [256, 512]}
    return RecallKindsArguments(str(place / "teacher"), [str(place / "story.txt")], str(output), **given | options)


def test_a_student_that_keeps_all_is_its_teacher(place, tmp_path):
    figures = measure(measuring(place, tmp_path / "out"))
    models = figures["models"]
    assert list(models) == ["teacher", "all", "none"]
    assert {kind: len(each) for kind, each in models["teacher"]["answers"]["400"].items()} == dict.fromkeys(
        HELD_OUT, 2
    )
    assert models["all"] == models["teacher"]
    assert models["none"]["loss"]["mean"]["8-32"] == pytest.approx(models["teacher"]["loss"]["mean"]["8-32"], abs=1e-4)
    assert models["none"]["loss"]["mean"]["32-128"] != models["teacher"]["loss"]["mean"]["32-128"]
    assert models["teacher"]["cache_bytes"] == {"256": 2 * 2 * 16 * 256 * 2, "512": 2 * 2 * 16 * 512 * 2}
    assert models["none"]["cache_bytes"]["512"] == models["none"]["cache_bytes"]["256"] < 2 * 2 * 16 * 64 * 2


def test_more_students_follow_without_asking_again(place, tmp_path):
    first = measure(measuring(place, tmp_path / "out", students={}))
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("teacher-*.json")}
    assert len(made) == 3
    figures = measure(measuring(place, tmp_path / "out", results=str(tmp_path / "figures.json")))
    assert figures["models"]["teacher"] == first["models"]["teacher"]
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert json.loads((tmp_path / "figures.json").read_text())["models"] == figures["models"]
    with pytest.raises(FileExistsError):
        measure(measuring(place, tmp_path / "out", texts=3))


def training_of(place, output, steps, **options):
    given = {"keep": KEPT, "window": WINDOW, "lengths": [512], "plain": 0.3, "resume": "auto"}
    arguments = RecallTrainingArguments(str(place / "teacher"), [str(place / "story.txt")], **given)
    fixed = {"max_steps": steps, "per_device_train_batch_size": 1, "learning_rate": 1e-3, "save_steps": 2}
    fixed |= {"lr_scheduler_type": "constant"}
    return arguments, small.training(output, **fixed | options)


def test_a_training_goes_on_where_it_was(place, tmp_path):
    train(*training_of(place, tmp_path / "whole", 4))
    train(*training_of(place, tmp_path / "stopped", 2))
    train(*training_of(place, tmp_path / "stopped", 4))
    train(*training_of(place, tmp_path / "untrained", 0))
    whole, stopped, untrained = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("whole", "stopped", "untrained")
    )
    for name, weight in whole.items():
        torch.testing.assert_close(stopped[name], weight, rtol=0, atol=0)
    assert any(not torch.equal(untrained[name], weight) for name, weight in whole.items())
    teacher = AutoModelForCausalLM.from_pretrained(place / "teacher").state_dict()
    assert all(torch.equal(untrained[name], weight) for name, weight in teacher.items())


def test_a_training_is_refused_before_anything_is_made(place, tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    for says, given, options in (
        ("overwrite=true", {"resume": None}, {}),
        ("max_steps", {"overwrite": True}, {"max_steps": -1}),
        ("per_device_train_batch_size=2 must be 1", {"overwrite": True}, {"per_device_train_batch_size": 2}),
    ):
        arguments, training = training_of(place, tmp_path, 2, **options)
        with pytest.raises((ValueError, FileExistsError), match=says):
            train(dataclasses.replace(arguments, **given), training)
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_rows_weigh_the_answers_of_held_in_kinds(place):
    tokenizer = AutoTokenizer.from_pretrained(place / "teacher")
    arguments, _ = training_of(place, "nowhere", 1)
    rows = RecallRows(arguments, tokenizer, 40, seed=0)
    plain = 0
    for index in range(40):
        row = rows[index]
        ids, weights = row["input_ids"], row["token_weights"]
        assert 256 < len(ids) == len(weights) <= 512
        answered = tokenizer.decode(ids[1:][weights[:-1] > 1])
        text = tokenizer.decode(ids)
        if "<assistant>" not in text:
            plain += 1
            assert not answered
        for question in text.split("<user>")[2:]:
            assert question.split("<assistant>")[1].split()[-1] in answered
        assert not any(word in text for word in HELD_OUT_WORDS)
    assert 4 < plain < 25 and len(HELD_IN) == 7
