"""Folders whose weights are not those of their configuration, which `from_pretrained` loads with a warning."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def lacking(weights, name):
    return {other: value for other, value in weights.items() if other != name}


def beyond(weights, name):
    return weights | {f"{name}_of_another": weights[name].clone()}


def of_another_shape(weights, name):
    value = weights[name]
    return weights | {name: torch.cat([value, value[:1]])}


def wrapped(weights, name):
    return {f"module.{other}": value for other, value in weights.items()}


def misspelt(weights, name):
    return lacking(weights, name) | {f"{name}s": weights[name]}


DAMAGES = {
    lacking: "lacks {name}, which",
    beyond: "holds {name}_of_another, which",
    of_another_shape: "holds {name} as ",
    wrapped: "was saved from a wrapper, as its 'module.",
    misspelt: "lacks {name}, which",
}
"""What is done to the tensors of a checkpoint → what is said of it; {name} is the tensor's."""


def damage(folder: Path, how, name: str) -> str:
    """Damage the weights of a folder; returns what is to be said of them."""
    file = folder / "model.safetensors"
    save_file(how(load_file(file), name), file, metadata={"format": "pt"})
    return DAMAGES[how].format(name=name)
