"""Train, evaluate, save, reload and score a small model.

It takes minutes on two cores and needs no network.

    make demo

Writes runs/demo/summary.json and runs/demo/loss.png.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import json
import random
import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from _lib.documents import DataArguments, begin_of, token_ids
from _lib.entry import guarded
from _lib.scoring import bigram_loss, scored_documents, sliding_loss, unigram_loss
from _lib.standard_text import standard_documents
from _lib.training import perplexity, plot_loss, write_json

import numpy as np
import yaml
from datasets import Dataset
from pretrain_clm import ModelArguments, pretrain
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainingArguments,
    pipeline,
    set_seed,
)

from hf_hybrid_ssm.cli.demo import build_parser
from hf_hybrid_ssm.cli.settings import as_flags
from hf_hybrid_ssm.evaluation import evaluate

TASK = "standard_text_continuation"
SUMMARY = "summary.json"
PROMPT = "Return a new list that"


def check_folder(folder: Path) -> None:
    """What an earlier demo wrote may be replaced, and nothing else.

    Raises:
        FileExistsError: the folder holds something else.
        NotADirectoryError: it is a file.
    """
    if folder.is_file():
        raise NotADirectoryError(f"--output {folder} is a file; a folder was expected.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    known = folder / SUMMARY
    if not known.is_file() or TASK not in known.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"--output {folder} holds what no demo wrote: name another folder, or empty this one.")


def train(documents: tuple[Dataset, Dataset], folder: Path, steps: int) -> dict:
    """The recipe itself, with settings for a few minutes."""
    model = ModelArguments(model_type="longhorn", config={"hidden_size": 160, "num_hidden_layers": 4}, overwrite=True)
    data = DataArguments(train_files=["(given)"], sequence_length=256, tokenizer_vocab_size=2048)
    training = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        weight_decay=0.1,
        adam_beta2=0.95,
        eval_strategy="steps",
        eval_steps=max(1, steps // 8),
        logging_steps=max(1, steps // 40),
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    return pretrain(model, data, training, documents)


def tokens_of(texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """One stream: the end of a document, which is the same token, begins the next."""
    ids = token_ids(list(texts["text"]), tokenizer)
    return np.array([begin_of(tokenizer), *(token for row in ids for token in [*row, tokenizer.eos_token_id])])


def write_task(texts: Dataset, folder: Path, questions: int) -> None:
    """An lm-eval task: which of four pieces of 80 characters continues the 200 before?"""
    choose = random.Random(0)
    pieces = []
    for text in texts["text"]:
        for start in range(0, len(text) - 280, 280):
            pieces.append((text[start : start + 200], text[start + 200 : start + 280]))
    choose.shuffle(pieces)
    rows = []
    for context, right in pieces[:questions]:
        others = [piece for _, piece in choose.sample(pieces, 4) if piece != right][:3]
        place = choose.randrange(len(others) + 1)
        rows.append({"context": context, "choices": [*others[:place], right, *others[place:]], "label": place})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str((folder / "test.jsonl").resolve())}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{TASK}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def demo(folder: Path, steps: int, questions: int, most_documents: int | None = None) -> dict:
    """Everything; returns what is written to summary.json."""
    check_folder(folder)
    begin = time.perf_counter()
    set_seed(0)
    documents = standard_documents(most_documents)
    # by which a later demo knows the folder, should this one be stopped
    write_json(folder / SUMMARY, {"lm_eval": {"task": TASK}, "complete": False})
    model_folder = folder / "model"
    results = train(documents, model_folder, steps)

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    train_tokens, held_out = (tokens_of(texts, tokenizer) for texts in documents)
    scored, _ = scored_documents(documents[1]["text"], tokenizer)
    loss = sliding_loss(model, scored, 256, 128)
    baselines = {  # of the same tokens
        "unigram": unigram_loss(train_tokens, held_out[1:], len(tokenizer)),
        "bigram": bigram_loss(train_tokens, held_out, len(tokenizer)),
    }

    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    generated = tokenizer.decode(model.generate(**inputs, max_new_tokens=40, do_sample=False)[0])
    generate_text: Any = pipeline("text-generation", model=str(model_folder))
    piped = generate_text(PROMPT, max_new_tokens=40, do_sample=False)[0]["generated_text"]

    write_task(documents[1], folder / "lm_eval_task", questions)
    scores = evaluate(str(model_folder), [TASK], include_path=folder / "lm_eval_task", device="cpu", bootstrap_iters=0)
    history = json.loads((model_folder / "history.json").read_text(encoding="utf-8"))
    plot_loss(
        history, folder / "loss.png", {f"{name} of the training text": level for name, level in baselines.items()}
    )
    summary = {
        "parameters": results["parameters"],
        "steps": results["steps"],
        "training_tokens": results["tokens"],
        "training_seconds": round(results["seconds"], 1),
        "training_tokens_per_second": round(results["tokens"] / results["seconds"]),
        "held_out_tokens": len(held_out) - 1,
        "held_out_perplexity": {
            "longhorn": round(perplexity(loss), 2),
            **{name: round(perplexity(level), 2) for name, level in baselines.items()},
        },
        "lm_eval": {
            "task": TASK,
            "questions": questions,
            "accuracy": scores["results"][TASK]["acc,none"],
            "chance": 0.25,
        },
        "generated": generated,
        "pipeline_equals_generate": piped == generated,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    write_json(folder / SUMMARY, summary)
    return summary


def report(summary: dict, folder: Path) -> str:
    scores = summary["held_out_perplexity"]
    rows = [
        ("parameters", f"{summary['parameters']:,}"),
        ("trained on", f"{summary['training_tokens']:,} tokens in {summary['training_seconds']:.0f} s"),
        ("held-out perplexity", f"{scores['longhorn']} (bigram {scores['bigram']}, unigram {scores['unigram']})"),
        ("lm-eval accuracy", f"{summary['lm_eval']['accuracy']:.2f} (chance 0.25)"),
        ("generates", repr(summary["generated"])),
        ("all in", f"{summary['seconds']:.0f} s"),
        ("written to", f"{folder}/summary.json, {folder}/loss.png, {folder}/model"),
    ]
    return "\n".join(f"{name:>20}  {value}" for name, value in rows)


def main() -> None:
    chosen = build_parser().parse_args(as_flags(sys.argv[1:]))
    folder = Path(chosen.output)
    with redirect_stdout(sys.stderr) if chosen.json else nullcontext():
        summary = demo(folder, chosen.steps, chosen.questions, chosen.documents)
    print(json.dumps(summary) if chosen.json else report(summary, folder))


if __name__ == "__main__":
    guarded("demo.py", main)
