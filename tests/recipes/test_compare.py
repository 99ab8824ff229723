"""Comparisons: settings are merged, every seed of every variant runs, and what is written is what was measured."""

import json
import statistics

import pytest
from compare import CompareArguments, compare, merged


def test_merging_goes_into_mappings_and_changes_nothing():
    base = {"a": 1, "config": {"x": 1, "y": [1, 2]}}
    assert merged(base, {"config": {"y": [3]}, "b": 2}) == {"a": 1, "b": 2, "config": {"x": 1, "y": [3]}}
    assert base == {"a": 1, "config": {"x": 1, "y": [1, 2]}}


def test_runs_and_summary(tmp_path):
    texts = [json.dumps({"text": f"a short text about the number {number} and no more"}) for number in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts), encoding="utf-8")
    base = {
        "model_type": "longhorn", "config": {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 2},
        "train_files": [f"{tmp_path}/texts.jsonl"], "sequence_length": 32, "tokenizer_vocab_size": 280,
        "max_steps": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    variants = {"narrow": {}, "wide": {"config": {"hidden_size": 16}}}
    arguments = CompareArguments(base, variants, str(tmp_path / "runs"), [0, 1], str(tmp_path / "results.json"))
    figures = compare(arguments)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written | figures == written
    for found in figures["models"].values():
        losses = [run["validation_loss"] for run in found["runs"]]
        assert [run["seed"] for run in found["runs"]] == [0, 1] and losses[0] != losses[1]
        assert found["validation_loss"] == pytest.approx(statistics.mean(losses))
    assert figures["models"]["wide"]["parameters"] > figures["models"]["narrow"]["parameters"]


@pytest.mark.parametrize("options", [{"variants": {"a": {}}}, {"variants": {"a": {}, "b": {}}, "seeds": []}])
def test_bad_settings(options):
    with pytest.raises(ValueError, match=r"variants|seeds"):
        CompareArguments({}, **options)
