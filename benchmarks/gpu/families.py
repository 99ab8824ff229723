"""The models that are checked, timed and trained, at sizes of the card or of a rehearsal."""

from transformers import PreTrainedModel

from benchmarks.gpu.settings import Settings
from benchmarks.timing.models import FAMILIES, build

ROWS = ("plain", "padded", "packed")


def small(name: str, settings: Settings, **options) -> PreTrainedModel:
    """A few layers, for checks."""
    width, depth = settings.pick((256, 2), (32, 1))
    sizes = {"vocabulary": settings.pick(1024, 64), "window": settings.pick(128, 8), "device": settings.device}
    return build(name, width, depth, **(sizes | options))


def large(name: str, settings: Settings, **options) -> PreTrainedModel:
    """About 125 million weights beside the embeddings and the head."""
    width, depth = settings.pick((768, 12), (32, 1))
    sizes = {"vocabulary": settings.pick(32000, 64), "window": settings.pick(512, 8), "device": settings.device}
    return build(name, width, depth, **(sizes | options))


__all__ = ["FAMILIES", "ROWS", "large", "small"]
