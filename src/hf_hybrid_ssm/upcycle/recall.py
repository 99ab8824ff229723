"""Which layers a teacher recalls with: what recall loses when they get windows, one after the other.

The probe needs no data (`recall_prompts`), no student and no training. Perplexity does not tell: a text is predicted
nearly as well without any reach. Removing one layer shows little, since others compensate: so layers are removed
greedily, the least needed of those that are left first.

What reaches back are the tokens of the question and of the answers. Those before them may be read in windows, in all
layers: so they are read once, for all prompts that share them, and only the end of a prompt again for each set of
layers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from hf_hybrid_ssm.students.configuration import teacher_attention
from hf_hybrid_ssm.students.initial import student_config, student_of
from hf_hybrid_ssm.upcycle.layer_ranking import LayerOrGroup, LayerRanking, RecallScore
from hf_hybrid_ssm.upcycle.probe_prompts import RecallPrompt, recall_prompts
from hf_hybrid_ssm.upcycle.teacher import Teacher
from hf_hybrid_ssm.upcycle.windowed_teacher import LayerReplay, ReadText, maskable, window_mask, windowed_groups

PROBE_WINDOW = 256
"""At most, of the ranking: prompts of eight windows take minutes."""
ONE_BY_ONE = 10
"""From so few layers on one goes at a time; before, a third of those that are left, by every second prompt."""
TOGETHER = 256
"""Tokens of ends of prompts that are read at once."""
ENOUGH = 0.5
"""Share of the tokens that a teacher must recall before its layers are ranked by it."""
Progress = Callable[[Sequence[Any]], Any]


class NoRecallError(ValueError):
    """The teacher itself does not recall what the probe asks for, or cannot read it."""


@torch.inference_mode()
def rank_by_recall(
    teacher: Teacher,
    window: int = PROBE_WINDOW,
    prompts: Sequence[RecallPrompt] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    kept: int = 0,
    of_groups: bool = False,
) -> LayerRanking:
    """The layers of a teacher that see all tokens by what recall loses without their reach; or single key/value
    groups, as (layer, group): not all groups of a layer recall, so that fewer of them keep as much.

    A windowed layer sees `window` tokens before its own, and the first token. All layers reach at first; then those
    that recall misses least get windows, a third of those left at a time by every second prompt, from ten on one at a
    time by all of them. The first in the order are those that went last. Each prompt takes the work of three forwards,
    and for a teacher of n layers that of about 2 n forwards of its question and answers alone.

    Args:
        window: of the probe; it need not be the student's.
        prompts: others than `recall_prompts(tokenizer, vocab_size, window, seed=seed)`.
        progress: wraps two sequences, as `tqdm` does: the prompts as they are read, and the forwards of their ends.
        kept: the ranking ends when so many are left, which are then ordered by what is lost without each of them
            alone. The fewer have to go, the less time it takes.
        of_groups: groups are ranked, which takes as many times longer as a layer has groups.

    Raises:
        NoRecallError: the teacher recalls less than half of the tokens, so that the ranking would be noise; or its
            positions end before the prompts.
        ValueError: all are to be kept.
    """
    prompts = _prompts(teacher, window, prompts, seed)
    parts: list[Any] = teacher.layers
    if of_groups:
        parts = [(layer, group) for layer in parts for group in range(teacher.groups)]
    if not 0 <= kept < len(parts):
        raise ValueError(f"kept={kept} must be below {len(parts)}, the parts that are ranked.")
    order: list[LayerOrGroup] = []
    scores: dict[LayerOrGroup, float] = {}
    wrapped: Any = progress or list
    with maskable(teacher):
        texts: dict[tuple[int, ...], ReadText] = {}
        endings = [_Ending(teacher, prompt, window, texts) for prompt in wrapped(prompts)]
        own = _score(ending.own for ending in endings)
        if own.right < ENOUGH:
            raise NoRecallError(
                f"the teacher recalls {own} of the probe; layers are ranked by recall from {ENOUGH:.0%} on, since "
                'below the ranking is noise. Choose by "kl" or "even", or give a list of layers.'
            )
        turns, left, forwards = _turns(len(parts), kept), list(parts), 0
        for leave in turns:
            forwards += len(_asked(endings, parts)) * (len(parts) + 1)
            parts = parts[leave:]
        steps = iter(wrapped(range(forwards)))  # alike, so that the time that is left can be told
        parts = list(left)
        for leave in turns:
            lost = _lost(steps, _asked(endings, left), left, order)
            least = sorted(left, key=lambda part: (lost[part], -parts.index(part)))
            scores |= lost
            order += least[:leave]
            left = [part for part in left if part in least[leave:]]
        order += sorted(left, key=lambda part: (scores[part], -parts.index(part)))
        next(steps, None)  # a progress bar closes at the end of its sequence
    return LayerRanking("group_recall" if of_groups else "recall", order[::-1], scores, window, own)


def _prompts(
    teacher: Teacher, window: int, prompts: Sequence[RecallPrompt] | None, seed: int
) -> Sequence[RecallPrompt]:
    """The prompts of a ranking, which the teacher has positions for."""
    if prompts is None:
        prompts = recall_prompts(teacher.tokenizer, teacher.config.vocab_size, window, seed=seed)
    longest, most = max(prompt.input_ids.shape[1] for prompt in prompts), teacher.config.max_position_embeddings
    if longest > most:
        raise NoRecallError(
            f"window={window} makes prompts of {longest} tokens, but the teacher has max_position_embeddings={most}: "
            "give a shorter window."
        )
    return prompts


def _score(answers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> RecallScore:
    """Of the log-probabilities of tokens, and whether each is the first choice, (N,) each."""
    logs, right = (torch.cat(parts) for parts in zip(*answers))
    return RecallScore(float(logs.double().mean()), float(right.double().mean()))


def _turns(parts: int, kept: int) -> list[int]:
    """How many parts get a window at a time, until so many are left."""
    turns = []
    while parts > kept:
        turns.append(min(parts - kept, max(1, parts // 3) if parts > ONE_BY_ONE else 1))
        parts -= turns[-1]
    return turns


def _asked(endings: Sequence[Any], parts: Sequence[LayerOrGroup]) -> Sequence[Any]:
    """While many parts are left, every second: of two texts with an odd number of kinds each kind once."""
    return endings if len(parts) <= ONE_BY_ONE else endings[::2]


class _Ending:
    """The question and answers of a prompt, after a text that is read in windows; `texts` are those that were read."""

    def __init__(self, teacher: Teacher, prompt: RecallPrompt, window: int, texts: dict[tuple[int, ...], ReadText]):
        device = teacher.model.device
        ids, length, first = prompt.input_ids.to(device), prompt.input_ids.shape[1], prompt.question
        self._others: torch.Tensor | None = None
        past = None
        if any(kind == "none" for kind, _ in teacher_attention(teacher.config)):  # its state cannot be read twice
            causal = window_mask(length, length, device=device)
            self._mask = window_mask(length, window, device=device)
            self._others = torch.where(torch.arange(length, device=device)[:, None] < first, self._mask, causal)
            first = 0
        else:
            self._mask = window_mask(length, window, device=device, first=first)
            text = tuple(ids[0, :first].tolist())
            if text not in texts:
                texts[text] = ReadText.in_windows(teacher, ids[:, :first], window)
            past = texts[text]
        self._replay = LayerReplay(teacher, ids[:, first:], past=past)
        self._teacher = teacher
        self._windowed: Sequence[LayerOrGroup] = ()
        self._of_groups: dict[frozenset[int], torch.Tensor] = {}
        self._answers = prompt.positions.to(device) - 1 - first, ids[0, prompt.positions.to(device)]

    @property
    def own(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the teacher itself recalls, as of `_log_probabilities`."""
        return _log_probabilities(self._teacher, self._replay.teachers_own, self._answers)

    def compare_with(self, windowed: Sequence[LayerOrGroup]) -> torch.Tensor:
        """Log-probabilities (N,) of the answers with these parts windowed, and the start of what follows."""
        self._windowed = windowed
        self._replay.compare_with(self._masks(windowed))
        return _log_probabilities(self._teacher, self._replay.base, self._answers)[0]

    def without_each(self, parts: Sequence[LayerOrGroup]) -> torch.Tensor:
        """The same with one more part windowed, (parts, N)."""
        states = self._replay.together([self._masks([*self._windowed, part]) for part in parts])
        positions, tokens = self._answers
        answers = positions + self._replay.length * torch.arange(len(parts), device=positions.device)[:, None]
        logs, _ = _log_probabilities(
            self._teacher, states.flatten(0, 1)[None], (answers.flatten(), tokens.repeat(len(parts)))
        )
        return logs.unflatten(0, (len(parts), -1))

    @property
    def at_once(self) -> int:
        """How many parts `without_each` should be given."""
        return max(1, TOGETHER // self._replay.length)

    def _masks(self, parts: Sequence[LayerOrGroup]) -> dict[int, torch.Tensor]:
        """By layer; of the same groups the same ones, as a replay tells masks apart by what they are."""
        masks = {} if self._others is None else dict.fromkeys(self._teacher.layers, self._others)
        groups: dict[int, set[int]] = {}
        for part in parts:
            if isinstance(part, tuple):
                groups.setdefault(part[0], set()).add(part[1])
            else:
                masks[part] = self._mask
        for layer, of_layer in groups.items():
            key, heads = frozenset(of_layer), self._teacher.config.num_attention_heads
            if key not in self._of_groups:
                self._of_groups[key] = windowed_groups(self._mask, key, heads, self._teacher.groups, self._others)
            masks[layer] = self._of_groups[key]
        return masks


def _lost(
    steps: Iterator[Any], endings: Sequence[_Ending], parts: Sequence[LayerOrGroup], windowed: Sequence[LayerOrGroup]
) -> dict[LayerOrGroup, float]:
    """What the mean log-probability loses when a part gets a window as others have already; a step a forward."""
    lost: dict[LayerOrGroup, list[torch.Tensor]] = {part: [] for part in parts}
    for ending in endings:
        next(steps)
        whole = ending.compare_with(windowed)
        for start in range(0, len(parts), ending.at_once):
            several = parts[start : start + ending.at_once]
            for part, logs in zip(several, ending.without_each(several)):
                next(steps)
                lost[part].append(whole - logs)
    return {part: float(torch.cat(found).double().mean()) for part, found in lost.items()}


@torch.inference_mode()
def recall_of(
    teacher: Teacher,
    prompts: Sequence[RecallPrompt],
    window: int,
    windowed: Collection[LayerOrGroup] = (),
    progress: Progress | None = None,
) -> RecallScore:
    """What a teacher recalls of the prompts with some layers windowed, all at once.

    Args:
        windowed: layers, or key/value groups as (layer, group).
    """
    model, parts = teacher.model, [(layer, group) for layer in teacher.layers for group in range(teacher.groups)]
    if windowed:
        keep = [part for part in parts if part not in windowed and part[0] not in windowed]
        model = student_of(model, student_config(teacher.config, keep, window, sink="first_token")).eval()
    answers = []
    with maskable(teacher):
        for prompt in prompts if progress is None else progress(prompts):
            ids, positions = prompt.input_ids.to(model.device), prompt.positions.to(model.device)
            logits = model(ids, use_cache=False, logits_to_keep=positions - 1).logits[0].float()
            answers.append(_of_answers(logits, ids[0, positions]))
    return _score(answers)


def _log_probabilities(
    teacher: Teacher, states: torch.Tensor, answers: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens to recall, float32 (N,), and whether each is the first choice, bool (N,)."""
    positions, tokens = answers
    return _of_answers(teacher.logits(states[:, positions])[0].float(), tokens)


def _of_answers(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As of `_log_probabilities`, of logits (N, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0], logits.argmax(-1) == tokens
