"""GLUE: every task's columns and measures, learning where there is something to learn, and clear refusals."""

import json
import random

import numpy as np
import pytest
from _lib.documents import train_tokenizer
from datasets import Dataset
from finetune_glue import TASKS, GlueArguments, finetune, glue, load_task, longest_first, measures_of, tokenized
from hypothesis import given
from hypothesis import strategies as st

from tests.recipes import small

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
WORDS = ["red", "green", "blue", "black", "white", "tall", "short", "wide", "thin", "old", "new"]


def write_task(folder, name, rows=320):
    """Rows whose label says whether a word is there (or how often)."""
    task, choose = TASKS[name], random.Random(0)
    for split in ("train", *task.validation):
        lines = []
        for _ in range(rows):
            words = choose.choices(WORDS, k=6)
            label = words.count("red") if task.num_labels == 1 else min(words.count("red"), task.num_labels - 1)
            texts = [" ".join(words), "and so on"]
            lines.append(dict(zip(task.columns, texts)) | {"label": label, "idx": 0})
        small.write_lines(folder / name / f"{split}.jsonl", lines)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    for name in TASKS:
        write_task(folder, name)
    return folder


def training(folder, **options):
    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 16, "learning_rate": 1e-2}
    return small.training(folder, **settings | options)


def test_every_task_runs_to_the_table(data, tmp_path):
    arguments = GlueArguments(data_folder=str(data), model_type="longhorn", config=TINY, max_train_rows=32)
    results = glue(arguments, training(tmp_path))
    assert set(results) == set(TASKS)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    table = (tmp_path / "results.md").read_text()
    assert "| mnli matched | accuracy |" in table and "| stsb | pearson / spearman |" in table
    assert results["rte"]["best"]["majority"]["validation"]["accuracy"] >= 50


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_predictions_are_saved_row_by_row(data, tmp_path, strategy):
    arguments = GlueArguments(["rte"], str(data), model_type="longhorn", config=TINY, max_train_rows=32)
    result = glue(arguments, training(tmp_path, train_sampling_strategy=strategy))["rte"]["best"]
    lines = (tmp_path / "rte/predictions_validation.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    assert [each["row"] for each in said] == list(range(320)) and "predictions" not in result
    labels = load_task("rte", str(data))["validation"]["label"]
    accuracy = 100 * np.mean([each["prediction"] == label for each, label in zip(said, labels)])
    assert result["measures"]["validation"]["accuracy"] == pytest.approx(accuracy, abs=0.01)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=2), st.integers(1, 30))
def test_the_longer_text_is_cut_first(sizes, length):
    parts = [list(range(size)) for size in sizes]
    found = longest_first(parts, length)
    assert sum(map(len, found)) == min(sum(sizes), length)
    assert all(cut == part[: len(cut)] for cut, part in zip(found, parts))
    short, long = sorted(zip(map(len, found), sizes), key=lambda pair: pair[1])[0], max(map(len, found))
    assert short[0] == short[1] or long - short[0] <= 1  # the shorter one is whole, or both are as long


def test_pairs_that_fit_are_whole():
    rows = Dataset.from_dict({"sentence1": ["a" * 40], "sentence2": ["b" * 10], "label": [1]})
    tokenizer = train_tokenizer(["something else"], 257)
    (ids,) = tokenized(rows, TASKS["rte"], tokenizer, 52)["input_ids"]
    end = tokenizer.eos_token
    assert tokenizer.decode(ids) == "a" * 40 + end + "b" * 10 + end
    (ids,) = tokenized(rows, TASKS["rte"], tokenizer, 42)["input_ids"]
    assert len(ids) == 42 and tokenizer.decode(ids).endswith(
        "a" + tokenizer.eos_token + "b" * 10 + tokenizer.eos_token
    )


def test_learns_and_the_grid_keeps_the_best(data, tmp_path):
    grid = {"learning_rate": [1e-6, 2e-2]}
    arguments = GlueArguments(["sst2"], str(data), model_type="longhorn", config=TINY, grid=grid)
    result = glue(arguments, training(tmp_path, num_train_epochs=6))["sst2"]
    assert [run["settings"]["learning_rate"] for run in result["runs"]] == [1e-6, 2e-2]
    assert result["best"]["settings"]["learning_rate"] == 2e-2
    accuracy = result["best"]["measures"]["validation"]["accuracy"]
    assert accuracy > result["best"]["majority"]["validation"]["accuracy"] + 10


def test_measures():
    labels, predicted = np.array([0, 1, 1, 1]), np.array([0, 1, 1, 0])
    assert measures_of(TASKS["mrpc"], labels, predicted) == {"f1": pytest.approx(80.0), "accuracy": 75.0}
    assert measures_of(TASKS["cola"], labels, predicted)["matthews"] == pytest.approx(57.735, abs=1e-3)
    values = measures_of(TASKS["stsb"], np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 9.0]))
    assert values["spearman"] == pytest.approx(100) and values["pearson"] < 100


def test_bad_data(data, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl"):
        load_task("rte", str(tmp_path))
    arguments = GlueArguments(["rte"], str(tmp_path), model_type="longhorn", config=TINY)
    without, beyond = {"sentence1": "a", "label": 0}, {"sentence1": "a", "sentence2": "b", "label": 7}
    for row, message in ((without, "sentence2"), (beyond, "run from 7 to 7")):
        for split in ("train", "validation"):
            small.write_lines(tmp_path / f"rte/{split}.jsonl", [row])
        with pytest.raises(ValueError, match=message):
            finetune("rte", arguments, training(tmp_path / "out"))
