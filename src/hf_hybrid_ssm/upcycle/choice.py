"""Which layers of a teacher keep their reach, or which of its key/value groups: a list, or so many by a ranking."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_hybrid_ssm.upcycle import divergence, recall
from hf_hybrid_ssm.upcycle.configurations import evenly_spaced, parts_of
from hf_hybrid_ssm.upcycle.divergence import rank_layers_by_kl, text_of
from hf_hybrid_ssm.upcycle.layer_ranking import LayerRanking, RecallScore, name_of, number_kept, ranking_of
from hf_hybrid_ssm.upcycle.probe_prompts import WINDOWS, recall_prompts
from hf_hybrid_ssm.upcycle.recall import (
    NoRecallError,
    groups_of,
    rank_groups_by_recall,
    rank_layers_by_recall,
    recall_of,
)
from hf_hybrid_ssm.upcycle.sensitivity import attention_sensitivity

logger = logging.getLogger(__name__)
WINDOW = 256
KEEP_BY = ("recall", "group_recall", "kl", "sensitivity", "even")


@dataclass(frozen=True)
class LayerChoice:
    """The layers that keep their reach, or the key/value groups, and why.

    Attributes:
        layers: in ascending order; or groups of layers, as (layer, group).
        by: "recall", "group_recall", "kl", "sensitivity", "even", or "list" if they were named.
        ranking: of all layers or groups; None where nothing was ranked.
        teacher, kept: what the teacher recalls of prompts that the ranking has not seen, and what it recalls with
            windows in all other layers or groups at once; None unless ranked by recall.
    """

    layers: list[Any]
    by: str
    ranking: LayerRanking | None = None
    teacher: RecallScore | None = None
    kept: RecallScore | None = None

    def __str__(self) -> str:
        lines = [] if self.ranking is None else [str(self.ranking)]
        lines.append(f"kept ({self.by}): {', '.join(map(name_of, self.layers)) or 'none'}")
        if self.kept is not None:
            lines.append(f"other prompts: the teacher recalls {self.teacher}; with these alone {self.kept}")
        return "\n".join(lines)


def parts_to_keep(config: Any, keep: float | Sequence[Any], keep_by: str | None = None) -> list[Any]:
    """The layers of a list, or its key/value groups; of a count or share as many as will be kept, not ranked yet.

    Raises:
        ValueError: there is no such layer, group, count, share or ranking.
    """
    if keep_by not in (None, *KEEP_BY):
        raise ValueError(f"keep_by={keep_by!r} must be one of {', '.join(map(repr, KEEP_BY))}.")
    if not isinstance(keep, int | float):
        return parts_of(keep, config)
    if keep_by != "group_recall":
        layers = config.num_hidden_layers
        return evenly_spaced(layers, number_kept(keep, layers))
    groups = groups_of(config)
    if not (count := number_kept(keep, len(groups), "key/value groups")):
        raise ValueError(f'keep={keep} keeps none of {len(groups)} key/value groups: leave out "group_recall".')
    return groups[:count]


def choose_layers(
    teacher: Any,
    keep: float | Sequence[Any],
    keep_by: str | None = None,
    tokenizer: Any | None = None,
    texts: Sequence[torch.Tensor] | None = None,
    window: int = WINDOW,
    seed: int = 0,
    progress: Callable[[Sequence[Any]], Any] | None = None,
) -> LayerChoice:
    """The layers to keep, or the key/value groups.

    Args:
        teacher: a causal language model that can be upcycled; not changed.
        keep: how many (int), which share (float), or a list of layers, or of groups as (layer, group).
        keep_by: "recall" (`rank_layers_by_recall`; the layers chosen are then tried together), "group_recall" (the
            same of single key/value groups, of which `keep` is then the count or share), "kl" (`rank_layers_by_kl`),
            "sensitivity" (`attention_sensitivity`), or "even" (evenly spaced); None: by recall, evenly spaced with a
            warning if the teacher does not recall. A list needs none.
        tokenizer: the teacher's, for recall.
        texts: token ids (B, L), for kl and sensitivity; None: what the teacher itself writes.
        window: tokens that a student's windowed layers will see before their own. Rankings use it, or a shorter one
            that takes less time (recall 256, kl 128) or fits the teacher's positions.
        seed: of prompts and of the teacher's text.
        progress: wraps what takes long, as `tqdm` does.

    Raises:
        ValueError: there is no such layer, group, count, share or ranking; the teacher does not recall
            (`NoRecallError`).
    """
    parts = parts_to_keep(teacher.config, keep, keep_by)
    if not isinstance(keep, int | float):
        return LayerChoice(parts, "list")
    count, layers = len(parts), teacher.config.num_hidden_layers
    if keep_by == "group_recall":
        if count == len(groups_of(teacher.config)):
            return LayerChoice(parts, keep_by)
        return _by_recall(teacher, count, tokenizer, window, seed, progress, rank_groups_by_recall)
    if keep_by == "even" or count in (0, layers):
        return LayerChoice(parts, "even")
    if keep_by in (None, "recall"):
        try:
            return _by_recall(teacher, count, tokenizer, window, seed, progress, rank_layers_by_recall)
        except NoRecallError as error:
            if keep_by is not None:
                raise
            logger.warning("The layers to keep are evenly spaced, not chosen by recall: %s", error)
            return LayerChoice(evenly_spaced(layers, count), "even")
    short = min(window, divergence.PROBE_WINDOW, teacher.config.max_position_embeddings // 4)
    if keep_by == "kl":
        ranking = rank_layers_by_kl(teacher, texts, short, seed, progress)
    else:
        if texts is None:
            texts = [text_of(teacher, divergence.ROWS, divergence.LENGTH_IN_WINDOWS * short, seed)]
        batches = [{"input_ids": text.to(teacher.device)} for text in texts]
        ranking = ranking_of(attention_sensitivity(teacher, batches), keep_by)
    return LayerChoice(sorted(ranking.layers[:count]), keep_by, ranking)


def _by_recall(
    teacher: Any,
    count: int,
    tokenizer: Any | None,
    window: int,
    seed: int,
    progress: Callable[..., Any] | None,
    rank: Callable[..., LayerRanking],
) -> LayerChoice:
    """The layers or groups that recall most needs, tried together on prompts that the ranking has not seen."""
    most = max(1, teacher.config.max_position_embeddings // (WINDOWS + 1))
    short = min(window, recall.PROBE_WINDOW, most)
    ranking = rank(teacher, tokenizer, short, seed=seed, progress=progress)
    others = recall_prompts(tokenizer, teacher.config.vocab_size, short, seed=seed + 1)
    own = recall_of(teacher, others, short)
    kept = recall_of(teacher, others, short, ranking.layers[count:])
    return LayerChoice(sorted(ranking.layers[:count]), ranking.by, ranking, own, kept)
