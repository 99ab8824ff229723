"""Which layers a teacher recalls with: each is windowed alone, on the teacher itself, and recall is asked for.

The probe needs no data (`recall_prompts`), no student and no training. A layer's score is the log-probability that the
answers lose without its reach. Perplexity does not tell: a text is predicted nearly as well without any reach.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_hybrid_ssm.upcycle.layer_ranking import LayerRanking, RecallScore, ranking_of
from hf_hybrid_ssm.upcycle.probe_prompts import RecallPrompt, recall_prompts
from hf_hybrid_ssm.upcycle.teachers import check_model_type
from hf_hybrid_ssm.upcycle.windowed_teacher import LayerReplay, maskable, window_mask, windowed_groups

PROBE_WINDOW = 64
"""Of the ranking: what recalls beyond a short window does so beyond a long one, and short prompts take less time."""
ENOUGH = 0.5
"""Share of the tokens that a teacher must recall before its layers are ranked by it."""
Progress = Callable[[Sequence[Any]], Any]


class NoRecallError(ValueError):
    """The teacher itself does not recall what the probe asks for, or cannot read it."""


@torch.inference_mode()
def rank_layers_by_recall(
    teacher: Any,
    tokenizer: Any | None = None,
    window: int = PROBE_WINDOW,
    prompts: Sequence[RecallPrompt] | None = None,
    seed: int = 0,
    keep: int | None = None,
    progress: Progress | None = None,
) -> LayerRanking:
    """The layers of a teacher by what recall loses when each alone gets a window.

    A windowed layer sees `window` tokens before its own, and the first token. Several layers may recall the same, so
    that each alone is missed little: with `keep`, the 2 · keep layers most needed are ranked again among themselves,
    by what is lost when each gets a window too and all others have one. Each prompt takes the work of about
    layers / 2 + 2 forwards, and of keep + 2 more.

    Args:
        teacher: a causal language model that can be upcycled; not changed.
        tokenizer: the teacher's; None: the prompts are random token ids.
        window: of the probe; it need not be the student's.
        prompts: others than `recall_prompts(tokenizer, vocab_size, window, seed=seed)`.
        keep: how many layers are to be kept; None: the first ranking is all.
        progress: wraps the sequence of prompts, as `tqdm` does, once or twice.

    Raises:
        NoRecallError: the teacher recalls less than half of the tokens, so that the ranking would be noise; or its
            positions end before the prompts.
        ValueError: it cannot be upcycled.
    """
    check_model_type(teacher.config)
    prompts = _prompts(teacher, tokenizer, window, prompts, seed)
    layers = range(len(teacher.model.layers))
    own = recall_of(teacher, prompts, window)
    if own.right < ENOUGH:
        raise NoRecallError(
            f"the teacher recalls {own} of the probe; layers are ranked by recall from {ENOUGH:.0%} on, since below "
            'the ranking is noise. Give keep_by="kl", keep_by="even" or a list of layers.'
        )
    alone = _losses(teacher, prompts if progress is None else progress(prompts), window, layers)
    ranking = ranking_of([alone[layer] for layer in layers], "recall", window=window, teacher=own)
    if keep is None or not 0 < 2 * keep < len(layers):
        return ranking
    candidates = ranking.layers[: 2 * keep]
    again = _losses(teacher, prompts if progress is None else progress(prompts), window, candidates, among=candidates)
    first = sorted(candidates, key=lambda layer: -again[layer])
    return replace(ranking, layers=first + ranking.layers[2 * keep :], again=again)


def _losses(
    teacher: Any,
    prompts: Iterable[RecallPrompt],
    window: int,
    layers: Sequence[int],
    among: Collection[int] | None = None,
) -> dict[int, float]:
    """What the mean log-probability loses when a layer gets a window, by layer.

    Args:
        among: all layers but these have one already; None: no other has.
    """
    others = [] if among is None else [index for index in range(len(teacher.model.layers)) if index not in among]
    lost: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    with maskable(teacher):
        for prompt in prompts:
            mask = window_mask(prompt.input_ids.shape[1], window, device=teacher.device)
            base = dict.fromkeys(others, mask)
            replay = LayerReplay(teacher, prompt.input_ids.to(teacher.device), base)
            answers = _answers(prompt, teacher)
            whole, _ = _log_probabilities(teacher, replay.base, answers)
            for layer in layers:
                found, _ = _log_probabilities(teacher, replay.hidden_states(base | {layer: mask}), answers)
                lost[layer].append(whole - found)
    return {layer: float(torch.cat(parts).double().mean()) for layer, parts in lost.items()}


@torch.inference_mode()
def recall_of(
    teacher: Any,
    prompts: Sequence[RecallPrompt],
    window: int,
    windowed: Collection[int] | Mapping[int, Collection[int]] = (),
) -> RecallScore:
    """What a teacher recalls of the prompts with some layers windowed, all at once.

    Args:
        windowed: layers; or layer → the key/value groups of it.
    """
    total, right, count = 0.0, 0, 0
    with maskable(teacher):
        for prompt in prompts:
            replay, answers = LayerReplay(teacher, prompt.input_ids.to(teacher.device)), _answers(prompt, teacher)
            mask = window_mask(replay.length, window, device=teacher.device)
            states = replay.hidden_states(_masks(mask, windowed, teacher.config))
            found, first = _log_probabilities(teacher, states, answers)
            total, right, count = total + float(found.sum()), right + int(first.sum()), count + len(found)
    return RecallScore(total / count, right / count)


def _masks(
    mask: torch.Tensor, windowed: Collection[int] | Mapping[int, Collection[int]], config: Any
) -> dict[int, torch.Tensor]:
    if not isinstance(windowed, Mapping):
        return dict.fromkeys(windowed, mask)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return {layer: windowed_groups(mask, groups, heads, kv_heads) for layer, groups in windowed.items()}


def _prompts(
    teacher: Any, tokenizer: Any | None, window: int, prompts: Sequence[RecallPrompt] | None, seed: int
) -> Sequence[RecallPrompt]:
    if prompts is None:
        prompts = recall_prompts(tokenizer, teacher.config.vocab_size, window, seed=seed)
    longest = max(prompt.input_ids.shape[1] for prompt in prompts)
    if longest > teacher.config.max_position_embeddings:
        raise NoRecallError(
            f"window={window} makes prompts of {longest} tokens, but the teacher has "
            f"max_position_embeddings={teacher.config.max_position_embeddings}: give a shorter window."
        )
    return prompts


def _answers(prompt: RecallPrompt, teacher: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions that the tokens to recall are predicted at, and these tokens, (N,) each."""
    positions = prompt.positions.to(teacher.device)
    return positions - 1, prompt.input_ids.to(teacher.device)[0, positions]


def _log_probabilities(
    teacher: Any, states: torch.Tensor, answers: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens to recall, float32 (N,), and whether each is the first choice, bool (N,)."""
    positions, tokens = answers
    logits = teacher.lm_head(states[0, positions]).float()
    found = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return found, logits.argmax(-1) == tokens
