"""What a context depends on: the weights of the model that read it, and the fields of its configuration."""

import dataclasses
import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedConfig

# they change neither a state nor what follows from it
WITHOUT_EFFECT = ("dropout", "_token_id", "use_cache", "use_linear_cross_entropy", "initializer_range")


def weights_fingerprint(model: Any) -> str:
    """SHA-256 over names, dtypes, shapes and values of everything that the decoder saves; its head takes no part.

    It reads all weights: some seconds for each 10 GB, and a copy of one tensor at a time where they are on a device.

    Raises:
        ValueError: weights are on the meta device (offloaded, or never loaded).
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.get_decoder().state_dict().items()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device: a context belongs to weights that can be read; load the model whole."
            )
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor, as they lie in memory."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def architecture(config: Any) -> dict[str, Any]:
    """The fields of a family's configuration that a state depends on, as JSON gives them back."""
    usual = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = (field.name for field in dataclasses.fields(config) if field.name not in usual)
    values = {name: getattr(config, name) for name in own if not any(part in name for part in WITHOUT_EFFECT)}
    return json.loads(json.dumps(values))
