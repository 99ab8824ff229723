"""The scripts of examples/, each as a user runs it, with small settings and small files."""

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests import processes
from tests.test_readme import can_serve

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CHECKPOINTS = ROOT / "checkpoints"
TEXT = "\n\n".join(topics.values())[:40_000]
PARAGRAPHS = [" ".join(part.split()) for part in re.split(r"\n\n+", TEXT) if 80 < len(part) < 400][:40]


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def run(name, *arguments, **options):
    done = processes.run([sys.executable, EXAMPLES / name, *arguments], **options)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout


def table(path, *rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "text.txt"


def test_the_page_has_every_script():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+\.py)`", page)) == {path.name for path in EXAMPLES.glob("*.py")}


def test_pretrain(text, tmp_path):
    needs("matplotlib")
    out = tmp_path / "out"
    short = ["--tokenizer", CHECKPOINTS / "longhorn-books", "--length", 32]
    run("pretrain.py", text, out, *short, "--steps", 4)
    assert (out / "model.safetensors").is_file() and (out / "loss.png").is_file()
    run("pretrain.py", text, out, *short, "--steps", 6)  # goes on where it was
    log = json.loads((out / "checkpoint-6/trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4, 5, 6]


def test_classify_and_deploy(tmp_path):
    needs("sklearn")
    rows = [[words, ("short", "long")[len(words) > 200]] for words in PARAGRAPHS]
    own = table(tmp_path / "own.csv", ["text", "label"], *rows)
    said = run("classify_csv.py", own, tmp_path / "out", "--model", CHECKPOINTS / "spade-encoder-books", "--epochs", 1)
    assert "eval_f1" in said and re.search(r"'label': '(short|long)'", said)
    assert "gives the logits" in run("deploy.py", tmp_path / "out", tmp_path / "own.pt2", "--length", 16)


def test_summarize(tmp_path):
    needs("rouge_score")
    rows = [[words, words.partition(".")[0]] for words in PARAGRAPHS[:12]]
    own = table(tmp_path / "own.csv", ["document", "summary"], *rows)
    short = ["--epochs", 1, "--tokens", 6]
    said = run("summarize.py", own, tmp_path / "out", "--model", CHECKPOINTS / "spade-seq2seq-books", *short)
    assert "eval_rougeL" in said and (tmp_path / "out/model.safetensors").is_file()
    saved = json.loads((tmp_path / "out/generation_config.json").read_text(encoding="utf-8"))
    assert (saved["max_length"], saved["num_beams"]) == (6, 4)


def test_lora(text, tmp_path):
    needs("peft")
    said = run("lora.py", text, tmp_path / "out", "--model", CHECKPOINTS / "longhorn-books", "--steps", 2)
    assert "trainable params" in said and "The old man" in said
    assert (tmp_path / "out/adapters/adapter_model.safetensors").is_file()


def test_own_task(tmp_path):
    needs("lm_eval")
    rows = [{"question": f"What follows {i}?", "choices": [str(i + 1), str(i + 3)], "answer": 0} for i in range(3)]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert "acc_norm" in run("own_lm_eval_task.py", own, CHECKPOINTS / "longhorn-books")


def test_serve_and_call():
    if not can_serve():
        pytest.skip("fastapi, uvicorn or openai not installed")
    port = processes.free_port()
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of this environment
    options = {"env": os.environ | {"PATH": programs}}
    run("serve_and_call.py", CHECKPOINTS / "longhorn-books", "Hello", "--port", port, "--tokens", 4, **options)


def test_embeddings(tmp_path):
    needs("sentence_transformers")
    (tmp_path / "texts.txt").write_text("\n".join(PARAGRAPHS[:3]), encoding="utf-8")
    said = run("embeddings.py", CHECKPOINTS / "spade-encoder-books", PARAGRAPHS[1], tmp_path / "texts.txt")
    score, _, first = said.splitlines()[0].partition("  ")
    assert first == PARAGRAPHS[1] and float(score) > 0.999


def test_longhorn_layer():
    assert "the model says" in run("longhorn_layer.py", "--steps", 2)


def test_student_chats(tmp_path):
    """Of a tiny teacher with the tokenizer and the chat template of a committed checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "longhorn-books")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    short = ["--keep", "1", "--keep-by", "even", "--window", "16", "--tokens", "4"]
    command = [sys.executable, EXAMPLES / "student.py", tmp_path / "teacher", tmp_path / "out", *short]
    said = "Hello there.\nAnd then?\n"
    done = subprocess.run(list(map(str, command)), input=said, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("> ") == 3 and (tmp_path / "out/model.safetensors").is_file()
