"""lm-eval scores our checkpoints; relative data files are found from anywhere."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import yaml
from _lib.documents import train_tokenizer
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.evaluation import evaluate
from tests import processes
from tests.cli.folders import save_checkpoint
from tests.tiny_models import config_of

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
ROWS = [{"question": "one two", "choices": [" three", " apple"], "label": 0}] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    save_checkpoint(folder / "model")
    write_task(folder)
    return folder


def write_task(folder: Path) -> None:
    """A task in `tasks`, and its rows in `data`."""
    (folder / "data").mkdir()
    (folder / "data/rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    task = {"task": "counting_here", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test"}
    task |= {"dataset_kwargs": {"data_files": {"test": "data/rows.jsonl"}}, "doc_to_text": "{{question}}"}
    task |= {"doc_to_target": "{{label}}", "doc_to_choice": "{{choices}}", "target_delimiter": ""}
    (folder / "tasks").mkdir()
    (folder / "tasks/counting.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def test_from_python_with_data_elsewhere(folder):
    options = {"include_path": folder / "tasks", "data_folder": folder, "device": "cpu", "bootstrap_iters": 0}
    results = [
        evaluate(str(folder / "model"), ["counting_here"], batch_size=size, **options)["results"]["counting_here"]
        for size in (1, 4)
    ]
    assert results[0]["sample_len"] == 3
    assert results[0]["acc,none"] == results[1]["acc,none"] in (0.0, 1.0)


def test_own_tasks_do_not_read_all_of_lm_evals(folder, monkeypatch):
    """14,000 files, 20 seconds; a task of lm-eval's own beside them is found all the same."""
    from lm_eval.tasks import TaskManager

    asked = []

    class Counting(TaskManager):
        def __init__(self, *given, include_defaults=True, **named):
            asked.append(include_defaults)
            super().__init__(*given, include_defaults=False, **named)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", Counting)
    options = {"include_path": folder / "tasks", "data_folder": folder, "device": "cpu"}
    evaluate(str(folder / "model"), ["counting_here"], bootstrap_iters=0, **options)
    assert asked == [False]
    with pytest.raises(ValueError, match="piqa"):  # not found here, since the double reads no defaults at all
        evaluate(str(folder / "model"), ["counting_here", "piqa"], bootstrap_iters=0, **options)
    assert asked == [False, False, True]


@pytest.mark.parametrize("family", ["longhorn", "spade s4 window", "bst sh s4d", "lmu-isa", "student: first tokens"])
def test_log_likelihoods_do_not_depend_on_the_batch(family, tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = train_tokenizer(["one two three apple"], 300)
    model = AutoModelForCausalLM.from_config(config_of(family, vocab_size=len(tokenizer))).eval()
    texts = [
        ("one", " two"),
        ("one two three", " apple"),
        ("a", " longer continuation, that goes on"),
        ("two", " one"),
    ]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(texts * 3)]
    scores = []
    for size in (1, 4, 8):
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, max_length=64, device="cpu")
        scores.append([value for value, _ in harness.loglikelihood(requests, disable_tqdm=True)])
    assert scores[1] == pytest.approx(scores[0], abs=1e-4) and scores[2] == pytest.approx(scores[0], abs=1e-4)
    assert len({round(score, 3) for score in scores[0]}) == len(texts)


@pytest.mark.parametrize("family", ["longhorn", "bst sh s4d"])
def test_max_length_is_what_a_prompt_is_cut_to(family, caplog):
    """By default lm-eval's own, as no configuration names a limit; given, prompts beyond it are read whole."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = train_tokenizer(["one two three apple"], 300)
    model = AutoModelForCausalLM.from_config(config_of(family, vocab_size=len(tokenizer))).eval()
    prompt = "one two three" * 800
    ids = torch.tensor([tokenizer(prompt + " apple")["input_ids"]])
    end = len(tokenizer(" apple")["input_ids"])
    with torch.no_grad():
        logits = model(ids).logits[0, -end - 1 : -1].log_softmax(-1)
    expected = float(logits.gather(1, ids[0, -end:, None]).sum())
    assert ids.shape[1] > 2100
    for given in (None, 4096):
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=given, device="cpu")
        assert harness.max_length == (given or 2048)
        with caplog.at_level("WARNING"):
            caplog.clear()
            found = harness.loglikelihood([Instance("loglikelihood", {}, (prompt, " apple"), 0)], disable_tqdm=True)
        assert ("Truncating" in caplog.text) == (given is None)
    assert found[0][0] == pytest.approx(expected, abs=1e-3)


def test_command_line_registers_the_families(folder):
    arguments = ["run", "--model", "hf", "--model_args", f"pretrained={folder / 'model'}", "--tasks"]
    arguments += ["counting_here,recall_needle", "--metadata", '{"multiples": [1], "samples": 2}']
    arguments += ["--include_path", str(folder / "tasks"), "--device", "cpu", "--output_path", str(folder / "scores")]
    command = [sys.executable, Path(__file__).with_name("own_tasks_alone.py"), "eval", *arguments]
    path = os.pathsep.join(p for p in sys.path if p)
    run = processes.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stderr[-2000:]
    assert "counting_here" in run.stdout
    assert "recall_needle" in run.stdout and "|acc_1x" in run.stdout
