"""What models recall of facts of many kinds in real texts: whole answers, beside the teacher's."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_hybrid_ssm.evaluation.intervals import wilson_interval
from hf_hybrid_ssm.evaluation.recall_tasks.real_texts import RealText
from hf_hybrid_ssm.hub.tables import Table
from hf_hybrid_ssm.models.cache_names import CACHE

Answers = list[tuple[str, bool]]
"""(kind, whether the whole answer is right), text by text."""


@torch.inference_mode()
def answers_of(model: Any, texts: Sequence[RealText], progress: Callable[[Any], Any] | None = None) -> Answers:
    """Whether each token of an answer is the model's first choice, for every question. A text is read once."""
    found: Answers = []
    for text in texts if progress is None else progress(texts):
        read = model(text.shared.to(model.device), use_cache=True, logits_to_keep=1)[CACHE]
        for asked in text.asked:
            options = {CACHE: copy.deepcopy(read), "logits_to_keep": len(asked.answer) + 1}
            logits = model(asked.ids.to(model.device), **options).logits[0, :-1]
            found.append((asked.kind, bool((logits.argmax(-1).cpu() == asked.answer).all())))
    return found


def kinds_table(answers: Mapping[str, Mapping[int, Answers]]) -> Table:
    """Whole answers right, and of those that the first model finds the share that each other finds too.

    Args:
        answers: name of a model → tokens of a text → its answers, to the same questions in every model.

    Raises:
        ValueError: two models were asked different questions.
    """
    teacher = next(iter(answers))
    asked = {length: [kind for kind, _ in found] for length, found in answers[teacher].items()}
    for name, by_length in answers.items():
        if {length: [kind for kind, _ in found] for length, found in by_length.items()} != asked:
            raise ValueError(f"{name} and {teacher} were asked different questions.")
    kinds = list(dict.fromkeys(kind for several in asked.values() for kind in several))
    rows = []
    for name, by_length in answers.items():
        row = [name]
        for length, found in by_length.items():
            row.append(_share(sum(right for _, right in found), len(found)))
            known = [own for (_, own), (_, its) in zip(found, answers[teacher][length], strict=True) if its]
            row.append("" if name == teacher else _percent(sum(known), len(known)))
        every = [each for found in by_length.values() for each in found]
        row += [str(sum(right for kind, right in every if kind == one)) for one in kinds]
        rows.append(row)
    columns = ["model"]
    for length, several in asked.items():
        columns += [f"right of {len(several)} in {length:,} tokens, 95 %", f"of {teacher}'s"]
    counts = [sum(several.count(kind) for several in asked.values()) for kind in kinds]
    columns += [f"{kind}, of {count}" for kind, count in zip(kinds, counts, strict=True)]
    return Table("Facts of many kinds in real texts: whole answers", columns, rows)


def _share(right: int, count: int) -> str:
    low, high = wilson_interval(right, count)
    return f"{right} ({low:.0%} to {high:.0%})"


def _percent(right: int, count: int) -> str:
    if not count:
        return ""
    low, high = wilson_interval(right, count)
    return f"{right / count:.0%} ({low:.0%} to {high:.0%})"
