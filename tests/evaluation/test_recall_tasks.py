"""Recall tasks: who sees only a window fails them, who sees all does not, and no text is cut."""

import argparse
import json
import random
import re
from itertools import pairwise

import pytest
from _lib.documents import train_tokenizer
from lm_eval._cli.run import Run
from lm_eval.api.model import LM
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.evaluation import RECALL_TASKS, evaluate
from hf_hybrid_ssm.evaluation.recall_tasks import RECALL_FOLDER, questions, with_files, with_tag, words
from hf_hybrid_ssm.evaluation.recall_tasks.documents import documents_of, score
from hf_hybrid_ssm.evaluation.recall_tasks.filler import sentences
from hf_hybrid_ssm.evaluation.recall_tasks.questions import QUESTIONS
from tests.tiny_models import config_of

WINDOW = 256
MULTIPLES = [1, 2, 4]
SAMPLES = 4


@pytest.fixture(scope="module")
def tokenizer():
    draw, filler = random.Random(0), sentences(random.Random(1))
    asked = [kind(draw) for kind in QUESTIONS.values() for _ in range(10)]
    return train_tokenizer(
        [*(next(filler) for _ in range(500)), *(fact for each in asked for fact in each.facts)], 1000
    )


class Reader(LM):
    """Answers from what it sees: the last `reach` tokens of a context, all of it for None."""

    max_length = 100_000

    tokenizer_name = "reader"

    def __init__(self, tokenizer, reach=None):
        super().__init__()
        self.tokenizer, self.reach, self.seen = tokenizer, reach, []

    def loglikelihood(self, requests, disable_tqdm=False):
        found = []
        for request in requests:
            context, continuation = request.args
            ids = self.tokenizer(context)["input_ids"]
            self.seen.append(len(ids))
            right = f" {self.answer(self.tokenizer.decode(ids if self.reach is None else ids[-self.reach :]))}"
            found.append((0.0 if right == continuation else -10.0, right == continuation))
        return found

    def chat_template(self, chat_template=False):
        return "as apply_chat_template does"

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return " ".join(message["content"] for message in chat_history) + " " * add_generation_prompt

    def answer(self, text):
        numbers = dict(re.findall(r"(\w+) (?:is|has the number) (\d{5})\.", text))
        for name, other in re.findall(r"(\w+) has the same number as (\w+)\.", text):
            numbers[name] = numbers.get(other)
        sought = dict(re.findall(r"(\w+) the \w+ was looking for the (\w+)\.", text))
        last = text.splitlines()[-1]
        if asked := re.search(r"magic numbers of (.*)\?", last):
            names = re.split(", | and ", asked[1])
            return ", ".join(f"{name}: {numbers.get(name)}" for name in names).removeprefix(f"{names[0]}: ")
        name = re.search(r"(\w+) (?:is|has the number|was looking for the)$", last)[1]
        return (sought if last.endswith("the") else numbers).get(name)

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError


@pytest.mark.parametrize("templated", [False, True])
@pytest.mark.parametrize("task", RECALL_TASKS)
def test_a_window_fails_where_the_whole_text_does_not(task, templated, tokenizer):
    """The answer follows one space, with a chat template too: other tokens are another answer."""
    options = {"metadata": {"window": WINDOW, "multiples": MULTIPLES, "samples": SAMPLES}, "bootstrap_iters": 0}
    options["apply_chat_template"] = templated
    whole, window = Reader(tokenizer), Reader(tokenizer, WINDOW)
    found = [evaluate(reader, [task], **options)["results"][task] for reader in (whole, window)]
    for multiple in MULTIPLES:
        assert found[0][f"acc_{multiple}x,none"] == 1
        assert found[1][f"acc_{multiple}x,none"] == (multiple == 1)
    assert found[0]["acc,none"] == 1 and found[1]["acc,none"] == pytest.approx(1 / 3)
    assert max(whole.seen) > 3.5 * WINDOW


@pytest.mark.parametrize("kind", QUESTIONS)
def test_documents_have_the_length_that_was_asked_for(kind, tokenizer):
    given = {"tokenizer": tokenizer, "max_length": 4 * WINDOW, "window": WINDOW, "samples": SAMPLES}
    rows = documents_of(kind, multiples=MULTIPLES, **given)["test"]
    assert [row["multiple"] for row in rows] == MULTIPLES * SAMPLES  # a limit takes all lengths alike
    for row in rows:
        length = len(tokenizer(f"{row['text']} {row['prefix']} {row['answer']}")["input_ids"])
        assert row["tokens"] - 3 <= length <= row["multiple"] * WINDOW
        assert length > row["multiple"] * WINDOW - 40
        assert row["multiple"] == 1 or row["distance"] > WINDOW
    assert rows.to_list() == documents_of(kind, multiples=MULTIPLES, **given)["test"].to_list()
    assert rows.to_list() != documents_of(kind, multiples=MULTIPLES, seed=1, **given)["test"].to_list()


def test_a_needle_lies_anywhere_beyond_the_window(tokenizer):
    given = {"tokenizer": tokenizer, "max_length": 4 * WINDOW, "window": WINDOW, "samples": 30, "multiples": [4]}
    distances = sorted(row["distance"] / WINDOW for row in documents_of("needle", **given)["test"])
    assert 1 < distances[0] < 1.5 and 3.4 < distances[-1] < 4 and 2 < distances[15] < 3


def test_filler_holds_no_answer():
    text = " ".join(next(filler) for filler in [sentences(random.Random(0))] for _ in range(5000))
    said = set(re.findall(r"\w+", text))
    for word in (*words.NAMES, *words.THINGS):
        assert word not in said
    assert not re.search(r"\d", text) and len(said) > 150
    assert len(set(words.NAMES)) == len(words.NAMES) and len(set(words.THINGS)) == len(words.THINGS)


def test_filler_may_be_a_file(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"This is the sentence with number {n} of a book." for n in range(30)), encoding="utf-8")
    given = {"tokenizer": tokenizer, "max_length": 512, "multiples": [2], "samples": 2, "text_file": str(path)}
    for row in documents_of("needle", **given)["test"]:
        found = [int(n) for n in re.findall(r"sentence with number (\d+)", row["text"])]
        assert len(found) > 10 and {(b - a) % 30 for a, b in pairwise(found)} == {1}
    path.write_text("Too short.", encoding="utf-8")
    with pytest.raises(ValueError, match="has 0 sentences"):
        documents_of("needle", **given)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        documents_of("needle", **given | {"text_file": "nowhere.txt"})


def test_a_text_that_would_be_cut_is_refused(tokenizer, tmp_path):
    """By the length that the model's configuration gives, by model_args, and by that of a loaded model."""
    config = config_of("longhorn", vocab_size=len(tokenizer), max_position_embeddings=500)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"metadata": {"multiples": [1, 2], "samples": 1}, "bootstrap_iters": 0, "device": "cpu"}
    with pytest.raises(ValueError, match="2 windows of 256 are 512 tokens, but the model reads 500"):
        evaluate(str(tmp_path), ["recall_needle"], **options)
    found = evaluate(str(tmp_path), ["recall_needle"], model_args={"max_length": 512}, **options)
    assert found["results"]["recall_needle"]["sample_len"] == 2
    reader = Reader(tokenizer)
    reader.max_length = 511
    with pytest.raises(ValueError, match="but the model reads 511"):
        evaluate(reader, ["recall_needle"], **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokenizer": None}, "name a tokenizer"),
        ({"max_length": None}, "never cut: name the model"),
        ({"multiples": [0]}, r"multiples=\[0\] must be numbers of windows"),
        ({"multiples": []}, r"multiples=\[\]"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"samples": 0}, "samples=0 must be at least 1"),
        ({"window": 20, "multiples": "1"}, "window=20 times 1 is .* tokens too short"),
    ],
)
def test_misuse_is_named(options, words, tokenizer):
    with pytest.raises(ValueError, match=words):
        documents_of("needle", **{"tokenizer": tokenizer, "max_length": 4096} | options)


def test_accuracy_is_that_of_the_whole_answer():
    assert score({"multiple": 4}, [(-3.0, True)]) == {"acc": 1.0, "acc_4x": 1.0}
    assert score({"multiple": 8}, [(-0.1, False)]) == {"acc": 0.0, "acc_8x": 0.0}


def test_a_chain_is_told_in_order_and_several_are_asked_in_another():
    draw = random.Random(3)
    for _ in range(20):
        chain = questions.variables(draw)
        assert len(chain.facts) == 6 and sum(chain.answer in fact for fact in chain.facts) == 1
        assert not any(chain.prefix.split()[0] in fact for fact in chain.facts[:4])
    asked = [questions.several(draw) for _ in range(20)]
    assert any(each.facts[0].split()[4] != each.prefix.rstrip(":") for each in asked)
    assert all(len(re.findall(r"\d{5}", each.answer)) == 4 for each in asked)


def lm_evals_options() -> argparse.ArgumentParser:
    """Its own parser of what follows `run`."""
    return Run(argparse.ArgumentParser().add_subparsers())._parser


def test_the_command_line_finds_them_by_their_files():
    """Whatever --include_path names; other arguments stay."""
    given = ["run", "--model", "hf", "--tasks", "piqa,recall_pairs", "recall_needle", "--output_path", "recall_needle"]
    file = str(RECALL_FOLDER / "recall_{}.yaml")
    wanted = [*given[:4], f"piqa,{file.format('pairs')}", file.format("needle"), *given[6:]]
    assert with_files(given) == wanted
    assert with_files(["run", "--tasks=recall_pairs,piqa"]) == ["run", f"--tasks={file.format('pairs')},piqa"]
    for option in ("-t", "--task"):  # and other ways to write it
        assert with_files([*given[:3], option, *given[4:]]) == [*wanted[:3], option, *wanted[4:]]
    for option in ("-t", "-t=", "--task="):
        found = with_files(["run", f"{option}recall_pairs,piqa", "--trackio_args", "a=recall_pairs"])
        assert found == ["run", f"{option}{file.format('pairs')},piqa", "--trackio_args", "a=recall_pairs"]
        parsed, _ = lm_evals_options().parse_known_args(found[1:])
        assert parsed.tasks == [file.format("pairs"), "piqa"]
    assert with_tag(["recall", "piqa"]) == [*RECALL_TASKS, "piqa"]
    assert {path.stem for path in RECALL_FOLDER.glob("*.yaml")} == set(RECALL_TASKS)
    assert json.dumps(with_files(["run", "--metadata", '{"window": 64}'])) == json.dumps(
        ["run", "--metadata", '{"window": 64}']
    )
