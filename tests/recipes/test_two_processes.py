"""Every recipe that evaluates ends in two processes with what one process finds, and writes it once.

The learning rate is 0, so that both score the same weights; no number of rows is a multiple of the batches.
"""

import json
import random
import sys
from pathlib import Path

import pytest
import yaml
from listops import write

from tests.recipes.launching import RECIPES, launched
from tests.recipes.small import QUIET, write_lines

LONGHORN = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
SPADE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPADE |= {"sliding_window": 5, "ssm_state_size": 4}
SEQ2SEQ = SPADE | {"num_decoder_layers": 1, "max_target_positions": 32}
TRAINING = {"max_steps": 2, "learning_rate": 0.0, "per_device_eval_batch_size": 4, "seed": 3, "overwrite": True}
TRAINING |= QUIET


def texts(folder):
    choose, words = random.Random(0), ["red", "green", "blue", "tall", "short", "old", "new"]
    rows = [{"text": " ".join(choose.choices(words, k=30))} for _ in range(30)]
    return write_lines(folder / "texts.jsonl", rows)


def pretrain_clm(folder):
    files = {"train_files": [texts(folder)], "validation_files": [texts(folder)], "tokenizer_vocab_size": 300}
    streamed = {"streaming": True, "shuffle_buffer": 4}
    return {"model_type": "longhorn", "config": LONGHORN, "sequence_length": 16} | files | streamed


def pretrain_seq2seq(folder):
    files = {"train_files": [texts(folder)], "validation_files": [texts(folder)], "tokenizer_vocab_size": 300}
    return {"model_type": "spade_seq2seq", "config": SEQ2SEQ, "sequence_length": 32} | files


def finetune_glue(folder):
    rows = [
        {"sentence1": row, "sentence2": "and so on", "label": number % 2} for number, row in enumerate("abcdefg" * 3)
    ]
    for split in ("train", "validation"):
        write_lines(folder / f"rte/{split}.jsonl", rows)
    found = {"tasks": ["rte"], "data_folder": str(folder), "model_type": "longhorn", "config": LONGHORN}
    return found | {"train_sampling_strategy": "group_by_length"}


def finetune_summarization(folder):
    rows = [{"document": f"{word} came. It went.", "summary": f"{word} came"} for word in "abcdefghijk"]
    files = [write_lines(folder / "rows.jsonl", rows)]
    found = {"train_files": files, "validation_files": files, "model_type": "spade_seq2seq", "config": SEQ2SEQ}
    return found | {"tokenizer_vocab_size": 300, "max_target_length": 8}


def lra(folder):
    if not folder.exists():  # both runs read the same files
        write(folder, (12, 7, 9), min_length=3, max_length=30)
    settings = {"task": "listops", "data_folder": str(folder), "model_type": "longhorn", "config": LONGHORN}
    return settings | {"eval_strategy": "steps", "eval_steps": 1}


def mqar(folder):
    models = {"longhorn": {"model_type": "longhorn", "num_hidden_layers": 1, "state_size": 4}}
    sizes = {"settings": [[16, 2]], "widths": [8], "learning_rates": [0.0], "vocab_size": 32, "train_rows": 12}
    return {"models": models, "test_rows": 11, "eval_strategy": "epoch"} | sizes


RUNS = [pretrain_clm, pretrain_seq2seq, finetune_glue, finetune_summarization, lra, mqar]


def measured(folder):
    """The figures without what differs from run to run, and the predictions."""
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))

    def scores(value):
        if isinstance(value, dict):
            left_out = ("seconds", "cpu_seconds", "tokens", "text_tokens", "train_loss", "epochs")
            return {key: scores(each) for key, each in value.items() if key not in left_out}
        return [scores(each) for each in value] if isinstance(value, list) else value

    predictions = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("predictions*"))}
    return scores(found), predictions


def close(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return other == pytest.approx(one, rel=1e-5) if isinstance(one, float) else one == other


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All recipes, one after the other, in one process and in two."""
    folder = tmp_path_factory.mktemp("recipes")
    for name, batch, ranks in (("one", 4, 1), ("two", 2, 2)):
        runs = []
        for recipe in RUNS:
            path = folder / f"{recipe.__name__}.yaml"
            path.write_text(yaml.safe_dump(TRAINING | recipe(folder / f"data-{recipe.__name__}")), encoding="utf-8")
            options = [f"output_dir={folder / name / recipe.__name__}", f"per_device_train_batch_size={batch}"]
            options += ["ddp_backend=gloo"] if name == "two" else []
            runs.append([str(RECIPES / f"{recipe.__name__}.py"), str(path), *options])
        command = [sys.executable, Path(__file__).with_name("several.py"), json.dumps(runs)]
        launched(command, ranks=ranks, cwd=folder)
    return folder


@pytest.mark.parametrize("recipe", RUNS, ids=lambda each: each.__name__)
def test_two_processes_score_as_one(folder, recipe):
    one, two = (measured(folder / name / recipe.__name__) for name in ("one", "two"))
    assert close(one[0], two[0]), (one[0], two[0])
    assert one[1] == two[1]
