"""Computing in the precision that a recurrence needs, whatever autocast says."""

import contextlib

import torch


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """No autocast on a device of this type; "meta" has none to disable."""
    if device_type == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type)):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
