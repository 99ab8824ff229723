"""What models recall of facts of many kinds in real texts: whole answers, beside the teacher's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_hybrid_ssm.evaluation.intervals import wilson_interval
from hf_hybrid_ssm.evaluation.recall_tasks.real_texts import RealText
from hf_hybrid_ssm.hub.tables import Table
from hf_hybrid_ssm.models.outputs import CACHE

Answers = dict[str, str]
"""Of each kind, text by text, "1" where the whole answer is right and "0" where it is not."""


@torch.inference_mode()
def answers_of(model: Any, texts: Sequence[RealText], progress: Callable[[Any], Any] | None = None) -> Answers:
    """Whether each token of an answer is the model's first choice, for every question. A text is read once, and its
    questions together: what fills up the shorter ones follows their answers."""
    found: Answers = {}
    for text in texts if progress is None else progress(texts):
        read = model(text.shared.to(model.device), use_cache=True, logits_to_keep=1)[CACHE]
        read.reorder_cache(torch.zeros(len(text.asked), dtype=torch.int64, device=model.device))  # a row a question
        rows = pad_sequence([asked.ids[0] for asked in text.asked], batch_first=True)
        most = rows.shape[1] - min(asked.ids.shape[1] - len(asked.answer) for asked in text.asked) + 1
        choices = model(rows.to(model.device), logits_to_keep=most, **{CACHE: read}).logits.argmax(-1).cpu()
        for row, asked in zip(choices, text.asked):
            end = asked.ids.shape[1] - 1 - (rows.shape[1] - most)
            is_right = bool((row[end - len(asked.answer) : end] == asked.answer).all())
            found[asked.kind] = found.get(asked.kind, "") + str(int(is_right))
    return found


def shared_answers(found: Answers, teacher: Answers) -> tuple[int, int]:
    """How many of the teacher's right answers are found too, and how many these are.

    Raises:
        ValueError: they were asked different questions.
    """
    if {kind: len(each) for kind, each in found.items()} != {kind: len(each) for kind, each in teacher.items()}:
        raise ValueError("a model and its teacher were asked different questions.")
    pairs = [(own, its) for kind, each in teacher.items() for own, its in zip(found[kind], each, strict=True)]
    return pairs.count(("1", "1")), sum(its == "1" for _, its in pairs)


def kinds_table(answers: Mapping[str, Mapping[int, Answers]], by_kind: bool = True) -> Table:
    """Whole answers right, and of those that the first model finds the share that each other finds too.

    Args:
        answers: name of a model → tokens of a text → its answers, to the same questions in every model.
        by_kind: with a column for each kind.

    Raises:
        ValueError: two models were asked different questions.
    """
    teacher, *_ = answers
    lengths = {length: sum(map(len, found.values())) for length, found in answers[teacher].items()}
    kinds = list(dict.fromkeys(kind for found in answers[teacher].values() for kind in found)) if by_kind else []
    columns = ["model"]
    for length, count in lengths.items():
        columns += [f"right of {count} in {length:,} tokens, 95 %", f"of {teacher}'s"]
    counts = {kind: sum(len(found.get(kind, "")) for found in answers[teacher].values()) for kind in kinds}
    columns += [f"{kind}, of {count}" for kind, count in counts.items()]
    rows = []
    for name, by_length in answers.items():
        row = [name]
        for length, count in lengths.items():
            found, known = shared_answers(by_length[length], answers[teacher][length])
            right = sum(each.count("1") for each in by_length[length].values())
            of_teacher = "" if name == teacher or not known else f"{found / known:.0%} ({_interval(found, known)})"
            row += [f"{right} ({_interval(right, count)})", of_teacher]
        row += [str(sum(found.get(kind, "").count("1") for found in by_length.values())) for kind in kinds]
        rows.append(row)
    return Table("Facts of many kinds: whole answers", columns, rows)


def _interval(right: int, count: int) -> str:
    low, high = wilson_interval(right, count)
    return f"{low:.0%} to {high:.0%}"
