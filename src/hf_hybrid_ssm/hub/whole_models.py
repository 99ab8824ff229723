"""Models all of whose weights come from their files.

`from_pretrained` makes up what a checkpoint lacks and leaves out what it holds beyond: right for a new head, and wrong
for a model that is to be used as it is.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_hybrid_ssm.hub.loaded_layers import WRAPPERS
from hf_hybrid_ssm.hub.one_line import few, in_one_line


def load_whole(auto_class: Any, source: Any, **options: Any) -> PreTrainedModel:
    """`auto_class.from_pretrained(source, **options)`, of a checkpoint with every tensor of the model and no other.

    Args:
        source: a folder or a name on the Hub; None if `state_dict` is among the options.

    Raises:
        ValueError: names a tensor that is missing, unexpected or of another shape.
    """
    reporting = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with _without_report():
        try:
            model, report = auto_class.from_pretrained(source, **options | reporting)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of converting tensors, in many lines
            raise ValueError(f"{str(source)!r} cannot be loaded: {in_one_line(error)}") from error
    if wrong := defect_of(report, type(model).__name__):
        raise ValueError(f"{str(source)!r} {wrong}" if source is not None else f"The checkpoint {wrong}")
    return model


def defect_of(report: Mapping[str, Any], model: str) -> str | None:
    """What a report of `from_pretrained` says against a checkpoint; None where all of its tensors are the model's, and
    all of the model's are there.

    Args:
        report: as `output_loading_info=True` gives it.
        model: the name of the model's class.
    """
    unexpected, missing = sorted(report["unexpected_keys"]), sorted(report["missing_keys"])
    if name := next((name for name in unexpected if WRAPPERS.search(name)), None):
        return f"was saved from a wrapper, as its {name!r} says: save the model inside of it instead."
    if missing:
        return f"lacks {few(missing)}, which a {model} has, and which would be random: give the whole checkpoint."
    if unexpected:
        return (
            f"holds {few(unexpected)}, which a {model} does not have, and which would be left out: give the "
            "checkpoint of such a model alone."
        )
    for name, found, wanted in report["mismatched_keys"]:
        return f"holds {name} as {tuple(found)}, and a {model} of its configuration has {tuple(wanted)}."
    return None


@contextmanager
def _without_report() -> Iterator[None]:
    """transformers' table of the same names is not printed beside the error."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(is_no_report)
