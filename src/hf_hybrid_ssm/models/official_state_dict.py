"""What converters of official checkpoints share: reading tensors, and loading all of them or none."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

PREFIXES = ("_orig_mod.", "module.", "transformer.")


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of an official checkpoint, without the prefixes that training wrappers add.

    Raises:
        ValueError: the file is truncated, holds anything but tensors where tensors belong, or is no state dict.
    """
    try:
        content = (
            load_file(path)
            if str(path).endswith(".safetensors")
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint of tensors ({type(error).__name__}: {error})."
        ) from error
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if not isinstance(content, dict) or not content or not all(isinstance(v, torch.Tensor) for v in content.values()):
        raise ValueError(f"{path} holds no state dict: a dict of tensors, or one under the key 'model', was expected.")
    return {_without_prefixes(key): tensor for key, tensor in content.items()}


def _without_prefixes(key: str) -> str:
    while matching := next((prefix for prefix in PREFIXES if key.startswith(prefix)), None):
        key = key.removeprefix(matching)
    return key


def load_exactly(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load tensors of exactly the model's names and shapes.

    Raises:
        ValueError: one is missing, unknown or of another shape; the model is unchanged then.
    """
    expected = {key: tensor.shape for key, tensor in model.state_dict().items()}
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ValueError(f"The checkpoint lacks {', '.join(missing)}.")
    for key, tensor in tensors.items():
        if key not in expected or tensor.shape != expected[key]:
            raise ValueError(f"{key} has shape {tuple(tensor.shape)}, but the model has {expected.get(key)}.")
    model.load_state_dict(tensors)
