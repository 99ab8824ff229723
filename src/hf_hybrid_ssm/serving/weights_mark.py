"""Which weights a model computes with at this moment: by their values, so that no write escapes."""

import json
import zlib
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_hybrid_ssm.hub.fingerprint import bytes_of
from hf_hybrid_ssm.serving.fingerprint import architecture

# what PEFT's layers say of themselves
OF_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


def weights_mark(model: Any) -> tuple[Any, ...]:
    """Equal for two calls if what the decoder computes from is: class, configuration, dtypes, devices, a checksum of
    every weight (CRC-32), adapters that are switched on, autocast, and training or not.

    It reads all weights once, as a token does, and on an accelerator copies them to the CPU. Unlike a fingerprint it
    is for one process.
    """
    decoder = model.get_decoder()
    weights = tuple(
        (name, str(tensor.dtype), tuple(tensor.shape), str(tensor.device), _checksum(tensor))
        for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())
    )
    adapters = tuple(
        (name, attribute, repr(getattr(module, attribute)))
        for name, module in decoder.named_modules()
        for attribute in OF_ADAPTERS
        if not callable(getattr(module, attribute, _shown))
    )
    device = next(decoder.parameters()).device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    fields = json.dumps(architecture(decoder.config), sort_keys=True)
    return type(decoder), fields, decoder.training, autocast, adapters, weights


def _shown() -> None:
    """What a module without the attribute has: callable, as transformers' own methods of these names are."""


def _checksum(tensor: torch.Tensor) -> int | tuple[int, ...]:
    if is_traceable_wrapper_subclass(tensor):  # quantized: the tensors that it is made of
        names, _ = tensor.__tensor_flatten__()
        return tuple(_flat(_checksum(getattr(tensor, name))) for name in names)
    if tensor.is_meta:
        raise ValueError("a weight is on the meta device, where it has no values to compare: load the model whole.")
    return zlib.crc32(bytes_of(tensor))


def _flat(checksum: int | tuple[int, ...]) -> int:
    return checksum if isinstance(checksum, int) else hash(checksum)
