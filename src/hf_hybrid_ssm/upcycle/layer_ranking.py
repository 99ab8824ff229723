"""The order in which a teacher's layers, or their key/value groups, are needed, and who says so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LayerOrGroup = int | tuple[int, int]
"""A layer, or (layer, key/value group)."""


@dataclass(frozen=True)
class RecallScore:
    """What a model recalls of a probe.

    Attributes:
        log_probability: of the tokens to recall, their mean, in nats.
        right: share of them that are the model's first choice.
    """

    log_probability: float
    right: float

    def __str__(self) -> str:
        return f"{self.right:.1%} of the tokens, log-probability {self.log_probability:.3f}"


@dataclass(frozen=True)
class LayerRanking:
    """Which layers' reach a teacher needs most, or that of which key/value groups.

    Attributes:
        by: "recall", "group_recall", "kl" or "sensitivity".
        layers: all of them, most needed first; by "group_recall" all groups, as (layer, group).
        scores: of each, in nats: what is lost without its reach when those behind it in the order have none either
            (recall; of those that a ranking which ended early left: when those that went have none), won with it
            alone (kl), or lost without its attention alone (sensitivity).
        window: tokens that a windowed layer sees before its own; None: the ranking has no windows.
        teacher: what the teacher itself recalls, of texts read in windows up to the question; None: nobody asked.
    """

    by: str
    layers: list[Any]
    scores: Mapping[Any, float]
    window: int | None = None
    teacher: RecallScore | None = None

    def __str__(self) -> str:
        parts = "groups" if self.by == "group_recall" else "layers"
        lines = [f"{parts} by {self.by}" + ("" if self.window is None else f", windows of {self.window}")]
        if self.teacher is not None:
            lines.append(f"the teacher recalls {self.teacher}")
        width = max(len(name_of(part)) for part in self.layers)
        lines += [f"{parts[:-1]} {name_of(part):>{width}}  {self.scores[part]:+.4f} nats" for part in self.layers]
        return "\n".join(lines)


def name_of(part: LayerOrGroup) -> str:
    """As people write it: a layer 7, a group 7:1."""
    return ":".join(map(str, part)) if isinstance(part, tuple) else str(part)


def ranking_of(scores: Mapping[Any, float], by: str, **fields: object) -> LayerRanking:
    """The layers by their scores, the earlier one first among equals."""
    order = sorted(scores, key=lambda layer: -scores[layer])
    return LayerRanking(by, order, dict(scores), **fields)  # type: ignore[arg-type]


def number_kept(keep: float, count: int, parts: str = "layers") -> int:
    """How many of the teacher's `count` layers, or key/value groups, a count (int) or a share (float) keeps.

    Raises:
        ValueError: there are fewer, or the share is none.
    """
    if isinstance(keep, int):
        if not 0 <= keep <= count:
            raise ValueError(f"keep={keep} must be a count between 0 and {count}, the teacher's {parts}.")
        return keep
    if not 0 <= keep <= 1:
        raise ValueError(f"keep={keep} must be a share between 0 and 1, a count, or a list of layers.")
    return round(keep * count)
