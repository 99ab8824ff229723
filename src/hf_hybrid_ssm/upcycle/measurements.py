"""What became of a teacher, in three tables: loss by position, answers from far back, and the cache by length."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from hf_hybrid_ssm.evaluation.intervals import wilson_interval
from hf_hybrid_ssm.evaluation.position_loss import loss_by_position, mean_by_position
from hf_hybrid_ssm.evaluation.recall_tasks.documents import document
from hf_hybrid_ssm.evaluation.recall_tasks.filler import sentences
from hf_hybrid_ssm.evaluation.recall_tasks.questions import needle
from hf_hybrid_ssm.hub.tables import Table
from hf_hybrid_ssm.planning.measurement import decoding_state_bytes
from hf_hybrid_ssm.students.configuration import HybridStudentConfig
from hf_hybrid_ssm.students.initial import student_config
from hf_hybrid_ssm.upcycle.teacher import layers_of

MULTIPLES = (1, 4, 8)
LENGTHS = (1024, 4096, 16384, 65536)
Progress = Callable[[Sequence[Any]], Any]
Models = Mapping[str, Any]
Prompt = tuple[torch.Tensor, torch.Tensor]


def needle_prompts(tokenizer: Any, window: int, samples: int, most: int | None) -> dict[int, list[Prompt]]:
    """Of each length, by its windows (1, 4 and 8), so many texts that hide a number, with what `_prompt` says of them.

    Args:
        most: tokens that the teacher reads; longer texts are left out, and so are those too short for a number and its
            question. None: without end.

    Raises:
        ValueError: none is left.
    """
    found: dict[int, list[Prompt]] = {}
    for multiple in MULTIPLES:
        if most is not None and multiple * window > most:
            continue
        draws = [random.Random(f"{window} {multiple} {sample}") for sample in range(samples)]
        with suppress(ValueError):  # too short
            found[multiple] = [_prompt(tokenizer, window, multiple, draw) for draw in draws]
    if not found:
        raise ValueError(
            f"no text of 1, 4 or 8 windows of {window} tokens that the teacher reads has room for a number and its "
            "question."
        )
    return found


def needle_table(
    models: Models, prompts: Mapping[int, Sequence[Prompt]], window: int, progress: Progress | None = None
) -> Table:
    """Whole answers right, of the texts of `needle_prompts`."""
    right = {name: dict.fromkeys(prompts, 0) for name in models}
    tasks = [(multiple, prompt) for multiple, several in prompts.items() for prompt in several]
    for multiple, (ids, answer) in tasks if progress is None else progress(tasks):
        for name, model in models.items():
            right[name][multiple] += _answers(model, ids, answer)
    counts = {multiple: len(several) for multiple, several in prompts.items()}
    rows = [
        [name, *(_share(found[multiple], counts[multiple]) for multiple in prompts)] for name, found in right.items()
    ]
    title = f"Needles: whole answers right of {max(counts.values())}, and 95 % intervals, by the tokens of the text"
    return Table(title, ["model", *(f"{multiple * window:,}" for multiple in prompts)], rows)


def _prompt(tokenizer: Any, window: int, multiple: int, draw: random.Random) -> Prompt:
    """The tokens (1, L) of a text that hides a number, in the chat template where there is one, with the question and
    the answer; and those of the answer alone, (N,)."""
    sample = document(needle(draw), sentences(draw), tokenizer, window, multiple, draw)
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": sample["text"]}]
        context = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    else:
        context = f"{tokenizer.bos_token or ''}{sample['text']} "
    context += sample["prefix"]
    ids = tokenizer(f"{context} {sample['answer']}", add_special_tokens=False)["input_ids"]
    before = len(tokenizer(context, add_special_tokens=False)["input_ids"])
    return torch.tensor([ids]), torch.tensor(ids[before:])


def _share(right: int, count: int) -> str:
    low, high = wilson_interval(right, count)
    return f"{right} ({low:.0%} to {high:.0%})"


@torch.inference_mode()
def _answers(model: Any, ids: torch.Tensor, answer: torch.Tensor) -> bool:
    """Whether each token of the answer (N,), which ends the text (1, L), is the model's first choice."""
    logits = model(ids.to(model.device), use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
    return bool((logits.argmax(-1).cpu() == answer).all())


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
        sizes = (cache_bytes(model.config, length, name_of_dtype) / 2**20 for length in LENGTHS)
        rows.append([name, *(f"{size:,.1f}" for size in sizes)])
    title = f"Cache of one sequence in MiB, in {name_of_dtype}, by its tokens"
    return Table(title, ["model", *(f"{length:,}" for length in LENGTHS)], rows)


def cache_bytes(config: Any, length: int, dtype: str) -> int:
    """Bytes of the cache of one sequence of a teacher or a student."""
    if not isinstance(config, HybridStudentConfig):  # its cache is that of a student that keeps all
        config = student_config(config, keep=layers_of(config))
    return decoding_state_bytes(config, length, dtype, "torch")
