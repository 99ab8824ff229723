"""Does a context's file hold what its model keeps of a text: every state, in its shape and kind of number?"""

from pathlib import Path
from typing import Any

import torch

from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.serving.state_layout import StateLayout, StateSpec, layout_without_running

DTYPES = {"tokens": torch.int32, "attention_mask": torch.bool}  # how they are stored
# the width of a floating-point state depends on autocast and on the kernels that ran
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HEADER = {"family": str, "dtype": str, "configuration": dict, "computation": dict, "weights": str, "num_tokens": int}
HEADER |= {"content": str}
NOTES = ("packing_state.", "unkept.")
"""Of documents and padding, where there were some, integers and flags; the latter are a layer's `not_cached`."""


def check_header(path: Path, header: Any) -> None:
    """A ValueError unless the header has exactly its fields, each of its type, and at least one token."""
    if not isinstance(header, dict) or header.keys() != HEADER.keys():
        names = ", ".join(map(repr, header)) if isinstance(header, dict) else type(header).__name__
        raise ValueError(f"{path} has a damaged header: its fields are {', '.join(HEADER)}, got {names[:200]}.")
    for name, kind in HEADER.items():
        if type(value := header[name]) is not kind:  # a bool is an int
            raise ValueError(f"{path} has a damaged header: {name} must be {kind.__name__}, got {value!r:.200}.")
    if header["num_tokens"] < 1:
        raise ValueError(f"{path} has a damaged header: num_tokens={header['num_tokens']} must be at least 1.")


def check_tensors(path: Path, tensors: States, num_tokens: int, model: Any) -> None:
    """The tensors are those of the model's cache after `num_tokens` tokens.

    Raises:
        ValueError: names the first that is missing, foreign, or has another shape, another kind of number, or NaN.
    """
    states = {name: tensor for name, tensor in tensors.items() if name not in DTYPES and not name.startswith(NOTES)}
    layout, expected, keys = _expected(model)
    for other in ("torch", None):  # whose kernels may keep other states of a text, which serve as well
        if (expected.keys() | keys) == states.keys():
            break
        with backend(other):
            layout, expected, keys = _expected(model)
    if missing := sorted((expected.keys() | keys) - states.keys()):
        raise ValueError(f"{path} lacks {missing[0]}, which this model keeps of a text.")
    if foreign := sorted(states.keys() - expected.keys() - keys):
        raise ValueError(f"{path} holds {foreign[0]}, which this model does not keep of a text.")
    first = next(iter(states.values()))
    batch = first.shape[0] if first.dim() else 0
    for name, tensor in tensors.items():
        if name in DTYPES:
            _check_text(path, name, tensor, batch, num_tokens, model.config.vocab_size)
        elif name.startswith(NOTES):
            if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() > 2:
                raise ValueError(f"{path}: {name} must hold whole numbers or flags, got {_shown(tensor)}.")
        elif name in keys:
            _check_keys(path, name, tensor, batch, num_tokens, model)
        else:
            grows = num_tokens if expected[name].layer in layout.growing else None
            _check_state(path, name, tensor, batch, expected[name], grows)
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(f"{path}: {name} holds NaN.")


def _expected(model: Any) -> tuple[StateLayout, dict[str, StateSpec], set[str]]:
    """The layout, its states by their names in the file, and the names of keys and values of all tokens."""
    layout = layout_without_running(model)
    own = {state.layer for state in layout.states}
    keys = {f"layers.{layer}.{name}" for layer in layout.growing if layer not in own for name in ("keys", "values")}
    return layout, {f"layers.{state.layer}.{state.name}": state for state in layout.states}, keys


def _check_state(path: Path, name: str, tensor: torch.Tensor, batch: int, state: StateSpec, grows: int | None) -> None:
    """A state has the shape of the layout; one that grows with the text may have up to a token's part for each."""
    wanted = (batch, *state.shape)
    same = tensor.dim() == len(wanted) and all(
        have == size or (grows is not None and axis > 0 and have <= grows)
        for axis, (have, size) in enumerate(zip(tensor.shape, wanted))
    )
    kind = tensor.dtype in FLOATS if state.dtype.is_floating_point else tensor.dtype == state.dtype
    if not same or not kind or batch < 1:
        raise ValueError(f"{path}: {name} must have shape {wanted} and dtype {state.dtype}, got {_shown(tensor)}.")


def _check_keys(path: Path, name: str, tensor: torch.Tensor, batch: int, num_tokens: int, model: Any) -> None:
    config = model.config
    wanted = (batch, config.num_key_value_heads, num_tokens, config.head_dim)
    if tuple(tensor.shape) != wanted or tensor.dtype not in FLOATS or batch < 1:
        raise ValueError(
            f"{path}: {name} must have shape (batch, heads, tokens, channels) = {wanted} and hold floating-point "
            f"numbers, got {_shown(tensor)}."
        )


def _check_text(path: Path, name: str, tensor: torch.Tensor, batch: int, num_tokens: int, vocabulary: int) -> None:
    if tensor.dim() != 2 or tensor.shape[0] != batch or tensor.shape[1] < num_tokens or tensor.dtype != DTYPES[name]:
        raise ValueError(
            f"{path}: {name} must have shape ({batch}, at least {num_tokens}) and dtype {DTYPES[name]}, got "
            f"{_shown(tensor)}."
        )
    if name == "tokens" and not bool(((tensor >= 0) & (tensor < vocabulary)).all()):
        raise ValueError(f"{path}: tokens must lie in the vocabulary, from 0 to {vocabulary - 1}.")


def _shown(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} and {tensor.dtype}"
