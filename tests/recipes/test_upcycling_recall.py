"""What students recall: counted at queries, before and after training; a stopped comparison goes on."""

import json

import pytest
import torch
from datasets import Dataset
from upcycling_recall import UpcyclingRecallArguments, recall, share_of_pairs

from tests.recipes import small

TEACHER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TASKS = {
    "pairs": {"pairs": {"settings": [[16, 1], [16, 2]], "vocab_size": 16, "train_rows": 64, "test_rows": 16}},
    "first": {
        "first_token": {
            "train_rows": 32, "answers": 4, "length": 16, "nearest": 2, "questions": 4, "test_rows": 8,
            "distances": [4, 24],
        },
        "teacher": {"train_sampling_strategy": "sequential"},
    },
}  # fmt: skip
STUDENTS = {"none": {"keep": 0.0, "memory": "longhorn", "instead": True, "state_size": 4}, "all": {"keep": 1.0}}


def settings(folder, **over):
    return small.training(folder, **{"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3} | over)


def test_students_start_from_a_teacher_and_are_measured_twice(tmp_path):
    tasks = {name: task | {"align": {"max_steps": 1}} for name, task in TASKS.items()}
    tasks["pairs"] |= {"finetune": {"learning_rate": 0.0}}
    arguments = UpcyclingRecallArguments(
        TEACHER, {"none": STUDENTS["none"]}, tasks, [3, 4], results=str(tmp_path / "figures.json")
    )
    figures = recall(arguments, settings(tmp_path / "runs"))
    assert json.loads((tmp_path / "figures.json").read_text())["tasks"] == json.loads(json.dumps(figures["tasks"]))
    pairs, first = figures["tasks"]["pairs"], figures["tasks"]["first"]
    assert set(pairs["none"]["recall"]) == {"1 pairs", "2 pairs"}
    assert set(first["teacher"]["recall"]) == {"4 tokens", "24 tokens"}
    for found in (pairs, first):
        assert [run["seed"] for run in found["none"]["runs"]] == [3, 4]
        assert "recall_at_the_start" in found["none"] and "recall_at_the_start" not in found["teacher"]
        assert found["none"]["runs"][0]["steps_of_align"] == 1 and found["none"]["runs"][0]["steps_of_finetune"] == 2
        shares = [run["recall"] for run in found["none"]["runs"]]
        for what, mean in found["none"]["recall"].items():
            assert mean["mean"] == pytest.approx(sum(share[what] for share in shares) / 2)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*.json") if "-" in path.name}
    assert len(made) == 8  # two tasks, two seeds, a teacher and a student
    assert recall(arguments, settings(tmp_path / "runs"))["tasks"] == json.loads(json.dumps(figures["tasks"]))
    assert made == {path: path.stat().st_mtime_ns for path in made}


def test_a_student_with_all_attention_is_its_teacher(tmp_path):
    tasks = {"pairs": TASKS["pairs"] | {"teacher": {"max_steps": 30, "learning_rate": 1e-2}}}
    arguments = UpcyclingRecallArguments(TEACHER, STUDENTS, tasks, [0])
    found = recall(arguments, settings(tmp_path))["tasks"]["pairs"]
    assert found["all"]["recall_at_the_start"] == found["teacher"]["recall"]
    assert "steps_of_align" not in found["all"]["runs"][0]  # there is nothing new
    assert found["none"]["recall_at_the_start"] != found["teacher"]["recall"]


def test_right_answers_are_counted_at_queries():
    class Model(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, ids, use_cache):
            logits = torch.zeros(*ids.shape, 10)
            logits[..., 7] = 1.0
            return type("Output", (), {"logits": logits})

    labels = [[-100, -100, 7, -100], [-100, 3, -100, 7], [-100, -100, -100, 4]]
    rows = Dataset.from_dict({"input_ids": [[1] * 4] * 3, "labels": labels}).with_format("torch")
    assert share_of_pairs(Model(), rows) == 2 / 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"students": {"teacher": {}}}, "students: 'teacher' is the name"),
        ({"tasks": {"a": {"align": {}}}}, r"tasks: 'a' has \['align'\]; it must have one of pairs, first_token"),
        ({"tasks": {"a": {"pairs": {}, "algin": {}}}}, r"'a' has \['algin'\], which are not among"),
        ({"tasks": {"a": {"first_token": {}}}}, "first_token of 'a' must have train_rows"),
        ({"tasks": {"a": {"pairs": {}, "align": {"steps": 1}}}}, r"align of 'a' has \['steps'\]"),
    ],
)
def test_settings_that_cannot_be_meant(wrong, message):
    with pytest.raises(ValueError, match=message):
        UpcyclingRecallArguments(**{"teacher": TEACHER, "students": STUDENTS, "tasks": TASKS} | wrong)


def test_a_student_that_cannot_be_made_costs_no_training(tmp_path):
    arguments = UpcyclingRecallArguments(TEACHER, {"wrong": {"keep": [5]}}, TASKS, [0])
    with pytest.raises(ValueError, match="names 5, but the teacher sees all tokens in the layers 0, 1"):
        recall(arguments, settings(tmp_path))
    assert not list(tmp_path.glob("*.json"))
