"""What converters of official checkpoints share: reading tensors, strict loading, checks."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

PREFIXES = ("_orig_mod.", "module.", "transformer.")
TOKENS = ("bos_token_id", "pad_token_id", "eos_token_id")

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
"""Keys, and our name for them: a template of the match, or a function of it."""


def our_name(key: str, rules: list[Rule]) -> str | None:
    """Our name for an official key by the first rule that matches; None if none does."""
    for pattern, name in rules:
        if match := pattern.fullmatch(key):
            return match.expand(name) if isinstance(name, str) else name(match)
    return None


def read_checkpoint(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of an official checkpoint, without the prefixes that training wrappers add, and the settings of the
    model that fairseq saves beside them (none in other files).

    Raises:
        ValueError: the file is truncated, holds anything but tensors where tensors belong, or is not a state dict.
    """
    content: Any
    try:
        if str(path).endswith(".safetensors"):
            content = load_file(path)
        else:
            # fairseq's command line; unpickling one sets attributes and runs nothing
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint of tensors ({type(error).__name__}: {error})."
        ) from error
    settings: dict[str, Any] = {}
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        settings = _settings(content)
        content = content["model"]
    if not isinstance(content, dict) or not content or not all(isinstance(v, torch.Tensor) for v in content.values()):
        raise ValueError(f"{path} holds no state dict: a dict of tensors, or one under the key 'model', was expected.")
    return {_without_prefixes(key): tensor for key, tensor in content.items()}, settings


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    """The model's settings: under "cfg" since fairseq 0.10, under "args" before."""
    groups = content.get("cfg")
    settings = groups.get("model") if isinstance(groups, dict) else content.get("args")
    if isinstance(settings, argparse.Namespace):
        settings = vars(settings)
    return settings if isinstance(settings, dict) else {}


def _without_prefixes(key: str) -> str:
    while matching := next((prefix for prefix in PREFIXES if key.startswith(prefix)), None):
        key = key.removeprefix(matching)
    return key


def load_state_dict_strict(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
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


def check_tokens(config: Any, chosen: dict[str, Any]) -> None:
    """The special tokens lie in the vocabulary: those of `config`, and those `chosen`, which it may have replaced.

    Raises:
        ValueError: one does not.
    """
    for name in TOKENS:
        token = chosen.get(name, getattr(config, name))
        if token is not None and not 0 <= token < config.vocab_size:
            raise ValueError(f"{name}={token} must lie in the checkpoint's vocabulary of {config.vocab_size} tokens.")
