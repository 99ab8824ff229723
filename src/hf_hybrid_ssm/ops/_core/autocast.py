"""Computing in the precision that a recurrence needs, whatever autocast says."""

import contextlib

import torch


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """No autocast on a device of this type; "meta" has none to disable."""
    return contextlib.nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
