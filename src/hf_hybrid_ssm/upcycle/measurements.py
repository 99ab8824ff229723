"""What became of a teacher, in three tables: loss by position, facts from far back, and the cache by length."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from hf_hybrid_ssm.evaluation.position_loss import loss_by_position, mean_by_position
from hf_hybrid_ssm.evaluation.recall_tasks.kinds import HELD_OUT
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import Answers, answers_of, kinds_table
from hf_hybrid_ssm.evaluation.recall_tasks.real_texts import RealText, real_texts
from hf_hybrid_ssm.hub.tables import Table
from hf_hybrid_ssm.planning.measurement import decoding_state_bytes
from hf_hybrid_ssm.students.configuration import HybridStudentConfig
from hf_hybrid_ssm.students.initial import student_config
from hf_hybrid_ssm.upcycle.teacher import layers_of

MULTIPLES = (4, 8)
LENGTHS = (1024, 4096, 16384, 65536)
Progress = Callable[[Sequence[Any]], Any]
Models = Mapping[str, Any]


def texts_of_facts(tokenizer: Any, window: int, count: int, most: int | None) -> dict[int, list[RealText]]:
    """Of each length in tokens (4 and 8 windows) so many made texts, with a fact of each kind that no choice has seen.

    Args:
        most: tokens that the teacher reads; longer texts are left out, and so are those too short for the facts. None:
            without end.

    Raises:
        ValueError: none is left.
    """
    found: dict[int, list[RealText]] = {}
    for length in (multiple * window for multiple in MULTIPLES):
        if most is None or length <= most:
            with suppress(ValueError):  # too short
                found[length] = real_texts(tokenizer, (), length, count, window)
    if not found:
        raise ValueError(
            f"no text of 4 or 8 windows of {window} tokens that the teacher reads has room for {len(HELD_OUT)} facts "
            "and a question."
        )
    return found


def facts_table(models: Models, texts: Mapping[int, Sequence[RealText]], progress: Progress | None = None) -> Table:
    """Whole answers right, of the questions about `texts_of_facts`, and what of the teacher's are found, by length."""
    tasks = [(name, length, text) for length, several in texts.items() for text in several for name in models]
    found: dict[str, dict[int, Answers]] = {name: {length: {} for length in texts} for name in models}
    for name, length, text in tasks if progress is None else progress(tasks):
        for kind, right in answers_of(models[name], [text]).items():
            found[name][length][kind] = found[name][length].get(kind, "") + right
    return kinds_table(found, by_kind=False)


def loss_table(models: Models, ids: torch.Tensor, window: int) -> Table:
    """Loss of a text (1, L), in nats per token, by the tokens before.

    Raises:
        ValueError: the text has fewer than four windows.
    """
    if ids.shape[1] < 4 * window:
        raise ValueError(f"the text has {ids.shape[1]} tokens, and at least {4 * window} are needed: four windows.")
    edges = [edge for edge in (window // 4, window, 2 * window, 4 * window, 8 * window) if edge <= ids.shape[1]]
    rows = []
    for name, model in models.items():
        losses = mean_by_position(loss_by_position(model, ids), edges)
        rows.append([name, *(f"{loss:.3f}" for loss in losses.values())])
    return Table("Loss in nats per token, by the tokens before", ["model", *losses], rows)


def cache_table(models: Models, dtype: torch.dtype) -> Table:
    """MiB of the cache of one sequence in a dtype, by its length."""
    rows, name_of_dtype = [], str(dtype).removeprefix("torch.")
    for name, model in models.items():
        sizes = cache_bytes(model.config, LENGTHS, name_of_dtype)
        rows.append([name, *(f"{size / 2**20:,.1f}" for size in sizes)])
    title = f"Cache of one sequence in MiB, in {name_of_dtype}, by its tokens"
    return Table(title, ["model", *(f"{length:,}" for length in LENGTHS)], rows)


def cache_bytes(config: Any, lengths: Sequence[int], dtype: str) -> list[int]:
    """Bytes of the cache of one sequence of a teacher or a student, after so many tokens each."""
    if not isinstance(config, HybridStudentConfig):  # its cache is that of a student that keeps all
        config = student_config(config, keep=layers_of(config))
    return decoding_state_bytes(config, lengths, dtype, "torch")
