"""Computing in the precision that a recurrence needs, whatever autocast would take."""

import contextlib

import torch


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """No autocast on a device of this type; "meta" has none that could be left."""
    return contextlib.nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
