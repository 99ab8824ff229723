"""Words alone: both baselines find what words can tell, on the measures of the task, and nothing where they cannot."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from glue_baselines import BaselineArguments, baselines, frozen_states, overlap, overlaps

from tests.recipes.small import write_lines


def write(folder, name, columns, rows):
    for split in ("train", "validation"):
        write_lines(folder / name / f"{split}.jsonl", (dict(zip((*columns, "label"), row)) for row in rows))


def test_overlap_counts_words_not_letters_or_order():
    assert overlap("The cat sat", "the CAT stood up") == pytest.approx((2 / 5, 2 / 3, 2 / 4))
    assert overlap("", "") == (0, 0, 0)
    rows = Dataset.from_dict({"a": ["x y", "x y"], "b": ["y x", "p q"]})
    assert overlaps(rows, ("a", "b")).tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_both_are_measured_where_they_exist(tmp_path):
    good, bad = ("a good one", 1), ("a bad one", 0)
    write(tmp_path, "sst2", ["sentence"], [good, bad] * 20)
    pairs = [("one two three", "one two three", 5.0), ("one two three", "four five six", 0.0)] * 20
    write(tmp_path, "stsb", ["sentence1", "sentence2"], pairs)
    results = tmp_path / "results.json"
    paths = {"output_dir": str(tmp_path / "out"), "results": str(results)}
    arguments = BaselineArguments(["sst2", "stsb"], str(tmp_path), 30, [0, 1], **paths)
    figures = baselines(arguments)
    (first, second) = figures["tasks"]["sst2"]["runs"]
    assert first["bag of words"]["validation"] == {"accuracy": 100.0} and "word overlap" not in second
    for run in figures["tasks"]["stsb"]["runs"]:
        assert run["word overlap"]["validation"]["pearson"] == pytest.approx(100.0)
    assert json.loads(results.read_text())["tasks"] == figures["tasks"]


def test_a_frozen_encoder_is_read(tmp_path):
    write(tmp_path, "sst2", ["sentence"], [("a good one", 1), ("a bad one", 0)] * 8)
    encoder = str(Path(__file__).parents[2] / "checkpoints/spade-encoder-books")
    arguments = BaselineArguments(["sst2"], str(tmp_path), None, [0], encoder, output_dir=str(tmp_path / "out"))
    (run,) = baselines(arguments)["tasks"]["sst2"]["runs"]
    states = [kind for kind in run if "encoder" in kind or "states" in kind]
    assert len(states) == 3 and all(run[kind]["validation"] == {"accuracy": 100.0} for kind in states)
    one, other = (frozen_states(["a good one"], arguments)[kind] for kind in states[1:])
    assert one.shape == (1, 256) and not (one == other).all()
