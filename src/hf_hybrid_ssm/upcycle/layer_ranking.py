"""The order in which a teacher's layers are needed, and who says so."""

from collections.abc import Sequence
from dataclasses import dataclass


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
    """Which layers' reach a teacher needs most.

    Attributes:
        by: "recall", "kl" or "sensitivity".
        layers: all of them, most needed first.
        scores: by layer, in nats: what is lost without its reach when the layers behind it in the order have none
            either (recall), won with it alone (kl), or lost without its attention alone (sensitivity).
        window: tokens that a windowed layer sees before its own; None: the ranking has no windows.
        teacher: what the teacher itself recalls; None: the ranking did not ask.
    """

    by: str
    layers: list[int]
    scores: list[float]
    window: int | None = None
    teacher: RecallScore | None = None

    def __str__(self) -> str:
        lines = [f"layers by {self.by}" + ("" if self.window is None else f", windows of {self.window}")]
        if self.teacher is not None:
            lines.append(f"the teacher recalls {self.teacher}")
        width = len(str(len(self.layers) - 1))
        lines += [f"layer {layer:>{width}}  {self.scores[layer]:+.4f} nats" for layer in self.layers]
        return "\n".join(lines)


def ranking_of(scores: Sequence[float], by: str, **fields: object) -> LayerRanking:
    """The layers by their scores, the lower index first among equals."""
    order = sorted(range(len(scores)), key=lambda layer: -scores[layer])
    return LayerRanking(by, order, list(scores), **fields)  # type: ignore[arg-type]


def number_of_layers(keep: float, layers: int) -> int:
    """How many of `layers` a count (int) or a share (float) keeps.

    Raises:
        ValueError: there are fewer, or the share is none.
    """
    if isinstance(keep, bool) or not isinstance(keep, int | float):
        raise TypeError(f"keep={keep!r} must be a count (int), a share (float) or a list of layers.")
    if isinstance(keep, int):
        if not 0 <= keep <= layers:
            raise ValueError(f"keep={keep} must be a count between 0 and {layers}, the teacher's layers.")
        return keep
    if not 0 <= keep <= 1:
        raise ValueError(f"keep={keep} must be a share between 0 and 1, a count, or a list of layers.")
    return round(keep * layers)
