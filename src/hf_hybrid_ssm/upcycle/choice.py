"""Which layers of a teacher keep their attention to all tokens, or which of its key/value groups: a list, or so many
by a ranking."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from hf_hybrid_ssm.students.configuration import key_value_groups
from hf_hybrid_ssm.upcycle import divergence, recall
from hf_hybrid_ssm.upcycle.divergence import rank_layers_by_kl, rank_layers_by_sensitivity, text_of
from hf_hybrid_ssm.upcycle.layer_ranking import LayerRanking, RecallScore, name_of, number_kept
from hf_hybrid_ssm.upcycle.probe_prompts import WINDOWS, recall_prompts
from hf_hybrid_ssm.upcycle.recall import NoRecallError, rank_by_recall, recall_of
from hf_hybrid_ssm.upcycle.teacher import Teacher, layers_of

logger = logging.getLogger(__name__)
WINDOW = 256
KEEP_BY = ("recall", "group_recall", "kl", "sensitivity", "even")
Progress = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Keep:
    """What a student keeps of its teacher's attention to all tokens; the rest gets windows.

    Args:
        parts: how many layers (int), which share (float), or a list of layers, or of key/value groups as
            (layer, group). Layers that have windows in the teacher, or no attention, are not counted.
        by: how a count or share is chosen: "recall" (`rank_by_recall`), "group_recall"
            (the same of key/value groups; `parts` is then a count or share of them), "kl"
            (`rank_layers_by_kl`), "sensitivity" (`rank_layers_by_sensitivity`), or "even" (evenly spaced); None: by
            recall, evenly spaced with a warning if the teacher does not recall. With a list, None.
        window: W, the tokens that a token sees before its own where the teacher's sees all.

    Raises:
        ValueError: there is no such count, share or ranking, or a list would be ranked.
    """

    parts: float | Sequence[Any] = 0.2
    by: str | None = None
    window: int = WINDOW

    def __post_init__(self) -> None:
        if self.by not in (None, *KEEP_BY):
            raise ValueError(f"by={self.by!r} must be one of {', '.join(map(repr, KEEP_BY))}, or None.")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window={self.window!r} must be a number of tokens, at least 1.")
        if isinstance(self.parts, bool | str) or not isinstance(self.parts, int | float | Sequence):
            raise TypeError(f"parts={self.parts!r} must be a count (int), a share (float) or a list.")
        if self.by is not None and not isinstance(self.parts, int | float):
            raise ValueError(f"by={self.by!r} chooses a count or share of layers, got the list parts={self.parts!r}.")

    def parts_of(self, config: PreTrainedConfig) -> list[Any]:
        """The layers of a list, or its key/value groups, in ascending order; of a count or share as many as will be
        kept, not ranked yet.

        Raises:
            ValueError: the teacher has no such layers or groups, or not so many.
        """
        layers, groups = layers_of(config), key_value_groups(config)
        if not isinstance(self.parts, int | float):
            return _listed(self.parts, layers, groups)
        if self.by != "group_recall":
            return evenly_spaced(layers, number_kept(self.parts, len(layers)))
        pairs = [(layer, group) for layer in layers for group in range(groups)]
        if not (count := number_kept(self.parts, len(pairs), "key/value groups")):
            raise ValueError(
                f'parts={self.parts} keeps none of {len(pairs)} key/value groups: leave out "group_recall".'
            )
        return pairs[:count]


@dataclass(frozen=True)
class LayerChoice:
    """The layers that keep their attention to all tokens, or the key/value groups, and why.

    Attributes:
        layers: in ascending order; or groups of layers, as (layer, group).
        by: "recall", "group_recall", "kl", "sensitivity", "even", or "list" if they were named.
        ranking: of all layers or groups; None where nothing was ranked.
        teacher, kept: what the teacher recalls of prompts that the ranking has not seen, and what it recalls with
            windows in all other layers or groups at once; None unless ranked by recall, and tried.
        window: W of the others.
    """

    layers: list[Any]
    by: str
    ranking: LayerRanking | None = None
    teacher: RecallScore | None = None
    kept: RecallScore | None = None
    window: int = WINDOW

    def __str__(self) -> str:
        lines = [] if self.ranking is None else [str(self.ranking)]
        lines.append(f"kept ({self.by}): {', '.join(map(name_of, self.layers)) or 'none'}")
        if self.kept is not None:
            lines.append(f"other prompts: the teacher recalls {self.teacher}; with these alone {self.kept}")
        return "\n".join(lines)


def evenly_spaced(layers: Sequence[int], count: int) -> list[int]:
    """`count` of the layers, each in the middle of its share."""
    return [layers[(2 * index + 1) * len(layers) // (2 * count)] for index in range(count)]


def _listed(parts: Sequence[Any], layers: list[int], groups: int) -> list[Any]:
    """A list of layers, or of key/value groups as (layer, group), in ascending order; each once.

    Raises:
        ValueError: none of `layers` is so, or the list has both.
    """
    found = [tuple(part) if isinstance(part, list) else part for part in parts]
    pairs = [part for part in found if isinstance(part, tuple)]
    if pairs and len(pairs) < len(found):
        raise ValueError(f"parts={list(parts)} names layers and key/value groups: give one kind.")
    known = {(layer, group) for layer in layers for group in range(groups)} if pairs else set(layers)
    if unknown := sorted(set(found) - known, key=str):
        of_groups = f", each with the key/value groups 0 to {groups - 1}" if pairs else ""
        raise ValueError(
            f"parts={list(parts)} names {name_of(unknown[0])}, but the teacher sees all tokens in the layers "
            f"{', '.join(map(str, layers)) or 'none'}{of_groups}."
        )
    return sorted(set(found))


def choose_layers(
    teacher: Teacher, keep: Keep, progress: Progress | None = None, is_tried: bool = True
) -> LayerChoice:
    """The layers to keep, or the key/value groups.

    Rankings use windows of `keep.window`, or shorter ones that take less time (recall 256, kl 128) or fit the
    teacher's positions.

    Args:
        progress: wraps what takes long, as `tqdm` does.
        is_tried: those that recall chose are then tried together (`LayerChoice.teacher`, `kept`).

    Raises:
        ValueError: as of `Keep.parts_of`; the teacher does not recall (`NoRecallError`).
    """
    parts, by = keep.parts_of(teacher.config), keep.by
    if not isinstance(keep.parts, int | float):
        return LayerChoice(parts, "list", window=keep.window)
    count, layers = len(parts), teacher.layers
    if by == "group_recall":
        if count == len(layers) * teacher.groups:
            return LayerChoice(parts, by, window=keep.window)
        return _by_recall(teacher, count, keep.window, progress, is_tried, of_groups=True)
    if by == "even" or count in (0, len(layers)):
        return LayerChoice(parts, "even", window=keep.window)
    if by in (None, "recall"):
        try:
            return _by_recall(teacher, count, keep.window, progress, is_tried)
        except NoRecallError as error:
            if by is not None:
                raise
            logger.warning("The layers to keep are evenly spaced, not chosen by recall: %s", error)
            return LayerChoice(parts, "even", window=keep.window)
    window = min(keep.window, divergence.PROBE_WINDOW, max(1, teacher.config.max_position_embeddings // 4))
    texts = [text_of(teacher, divergence.ROWS, divergence.LENGTH_IN_WINDOWS * window)]
    if by == "kl":
        ranking = rank_layers_by_kl(teacher, texts, window, progress=progress)
    else:
        ranking = rank_layers_by_sensitivity(teacher, texts, progress)
    return LayerChoice(sorted(ranking.layers[:count]), ranking.by, ranking, window=keep.window)


def _by_recall(
    teacher: Teacher, count: int, window: int, progress: Progress | None, is_tried: bool, of_groups: bool = False
) -> LayerChoice:
    """The layers or groups that recall most needs, tried together on prompts that the ranking has not seen."""
    most = max(1, teacher.config.max_position_embeddings // (WINDOWS + 1))
    short = min(window, recall.PROBE_WINDOW, most)
    ranking = rank_by_recall(teacher, short, progress=progress, kept=count, of_groups=of_groups)
    layers = sorted(ranking.layers[:count])
    if not is_tried:
        return LayerChoice(layers, ranking.by, ranking, window=window)
    others = recall_prompts(teacher.tokenizer, teacher.config.vocab_size, short, seed=1)
    own = recall_of(teacher, others, short, progress=progress)
    kept = recall_of(teacher, others, short, ranking.layers[count:], progress)
    return LayerChoice(layers, ranking.by, ranking, own, kept, window)
