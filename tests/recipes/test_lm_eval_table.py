"""The table of ten tasks: local task files, every column, resumed runs, refusals before anything is scored."""

import json

import lm_eval_table as recipe
import pytest
import yaml
from _lib.documents import train_tokenizer
from lm_eval_table import COLUMNS, TableArguments, lm_eval_table
from transformers import AutoTokenizer

from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def measures(*names):
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Task files of the ten names, as small as they can be, and a checkpoint."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "lm_eval_tasks").mkdir()
    (folder / "lm_eval").mkdir()
    rows = [
        {"question": "one two", "choices": [" three", " apple"], "label": n % 2, "text": "one two"} for n in (0, 1, 1)
    ]
    (folder / "lm_eval/rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name in COLUMNS:
        task = {"task": f"{name}_local", "dataset_path": "json", "test_split": "test"}
        task["dataset_kwargs"] = {"data_files": {"test": "lm_eval/rows.jsonl"}}
        if name == "wikitext":
            task |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
            task["metric_list"] = [{"metric": "word_perplexity"}]
        elif name == "lambada_openai":
            task |= {"output_type": "loglikelihood", "doc_to_text": "{{question}}", "doc_to_target": " three"}
            task["metric_list"] = [*measures("acc"), {"metric": "perplexity", "aggregation": "perplexity"}]
        else:
            task |= {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{label}}"}
            task |= {"doc_to_choice": "{{choices}}", "metric_list": measures("acc", "acc_norm")}
        (folder / f"lm_eval_tasks/{name}_local.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    tokenizer = train_tokenizer(["one two three apple"], 300)
    config = LonghornConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4)
    LonghornForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def arguments(data, output, **options):
    options = {"models": {"Longhorn": str(data / "model")}, "device": "cpu"} | options
    return TableArguments(data_folder=str(data), output_dir=str(output), **options)


def test_all_ten_and_resumed(data, tmp_path, monkeypatch):
    figures = lm_eval_table(arguments(data, tmp_path, results=str(tmp_path / "copy.json")))
    row = figures["models"]["Longhorn"]
    assert list(row["tasks"]) == list(COLUMNS)
    assert row["tasks"]["piqa"]["acc"] in (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert row["tasks"]["piqa"]["documents"] == 3 and row["tasks"]["wikitext"]["word_perplexity"] > 1
    assert row["average"] == pytest.approx(row["tasks"]["piqa"]["acc"])  # all eight are the same here
    written = json.loads((tmp_path / "copy.json").read_text())
    assert written | figures == written
    head, _, line = (tmp_path / "results.md").read_text().splitlines()
    assert head == (
        "| model | parameters | PIQA | Hella | Wino | ARC-e | ARC-c | OBQA | SIQA | BoolQ | avg. | LAMBADA | "
        "LAMBADA ppl | WikiText ppl |"
    )
    assert line.count("|") == head.count("|") and "|  |" not in line

    with pytest.raises(FileExistsError, match="overwrite"):
        lm_eval_table(arguments(data, tmp_path))
    with pytest.raises(ValueError, match="was made with"):
        lm_eval_table(arguments(data, tmp_path, resume=True, limit=1))
    other = LonghornForCausalLM.from_pretrained(data / "model")
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(data / "model").save_pretrained(tmp_path / "other")
    for given in ({"dtype": "float64"}, {"models": {"Longhorn": str(tmp_path / "other")}}):
        with pytest.raises(ValueError, match=r"was made with|has the scores of .*model; give it another name"):
            lm_eval_table(arguments(data, tmp_path, resume=True, **given))
    cut = json.loads((tmp_path / "results.json").read_text())
    for task in list(COLUMNS)[4:]:
        del cut["models"]["Longhorn"]["tasks"][task]
    (tmp_path / "results.json").write_text(json.dumps(cut))
    scored, score = [], recipe.score
    monkeypatch.setattr(recipe, "score", lambda lm, tasks, *rest: scored.append(tasks) or score(lm, tasks, *rest))
    assert lm_eval_table(arguments(data, tmp_path, resume=True)) == figures
    assert scored == [list(COLUMNS)[4:]]


def test_bad_input(data, tmp_path):
    with pytest.raises(ValueError, match="at least one model"):
        lm_eval_table(arguments(data, tmp_path, models={}))
    with pytest.raises(FileNotFoundError, match=r"models\.b.*config\.json"):
        lm_eval_table(arguments(data, tmp_path, models={"a": str(data / "model"), "b": str(tmp_path)}))
    config = LonghornConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, state_size=4)
    config.save_pretrained(tmp_path / "small")
    train_tokenizer(["one two"], 280).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="vocab_size=100"):
        lm_eval_table(arguments(data, tmp_path / "out", models={"a": str(tmp_path / "small")}))
