"""Checks of every model's inputs, before the first layer."""

import inspect
import sys
from difflib import get_close_matches
from typing import Any

import torch
from transformers.utils import TransformersKwargs

from hf_hybrid_ssm.ops.core.checks import can_read_values

INTEGERS = (torch.int32, torch.int64)
# what every forward may be given: what transformers lists, and what its decorators, `generate` and losses hand on
LISTED = frozenset(TransformersKwargs.__annotations__) | {"return_dict", "use_cache", "is_causal"}
LISTED |= {"debug_io", "debug_io_dir", "prune_layers", "shift_labels", "ignore_index"}
LISTED |= {"skip_logits"}  # of a Trainer that evaluates with use_liger_kernel, which has no kernels for these models


def refuse_where(is_wrong: torch.Tensor, message: str) -> None:
    """
    Raises:
        ValueError: `is_wrong` () bool is true; where the host cannot read it, an assertion of the device.
    """
    if not can_read_values(is_wrong):
        torch._assert_async(~is_wrong, message)
    elif bool(is_wrong):
        raise ValueError(message)


def check_arguments(model: Any, others: dict[str, Any]) -> None:
    """A forward takes its own arguments, and `others` that transformers gives to any forward.

    Raises:
        TypeError: there is another, which would have no effect.
        ValueError: as of `check_is_causal`.
    """
    check_is_causal(model, others)
    unknown = [name for name in others if name not in LISTED]
    if not unknown:
        return
    own = [name for name in inspect.signature(model.forward).parameters if name != "kwargs"]
    near = get_close_matches(unknown[0], [*own, *sorted(LISTED)], 1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise TypeError(
        f"{type(model).__name__}.forward has no argument {unknown[0]!r}.{meant} It takes {', '.join(own)}."
    )


def check_is_causal(model: Any, others: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: `is_causal` is not what the model is: only layers that see all tokens would follow it.
    """
    is_causal = not getattr(model, "is_bidirectional", False)
    if others.get("is_causal", is_causal) not in (None, is_causal):
        raise ValueError(f"is_causal={not is_causal}: {type(model).__name__} is {'' if is_causal else 'not '}causal.")


def check_token_ids(name: str, ids: torch.Tensor, vocab_size: int, *, ignore_index: int | None = None) -> None:
    """Token ids must be integers within the vocabulary (checked on CPU only, where reading values is cheap).

    Raises:
        TypeError: `ids` is not an integer tensor.
        ValueError: an id is outside of 0 … vocab_size - 1 (and not `ignore_index`).
    """
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of token ids, got {type(ids).__name__}.")
    if ids.dtype not in INTEGERS:
        raise TypeError(f"{name} must be int32 or int64 token ids, got {ids.dtype}.")
    if not can_read_values(ids) or ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if ignore_index is not None and low == ignore_index:
        low = int(ids.masked_fill(ids == ignore_index, 0).min())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} has ids from {low} to {high}, but the model's vocab_size is {vocab_size}: the tokenizer and the "
            "model do not belong together."
        )


def check_labels(labels: torch.Tensor, vocab_size: int, shape: torch.Size | None, ignore_index: int = -100) -> None:
    """Token ids to predict, `ignore_index` to ignore a position; of the input's `shape`, if that is known.

    Raises:
        TypeError: `labels` is not an integer tensor.
        ValueError: another shape, or an id outside the vocabulary.
    """
    check_token_ids("labels", labels, vocab_size, ignore_index=ignore_index)
    if shape is None and labels.dim() != 2:
        raise ValueError(f"labels must have shape (batch, length), got {tuple(labels.shape)}.")
    if shape is not None:
        check_shape(labels, shape)


def check_integers(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype not in INTEGERS:
        have = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {have}.")


def check_shape(labels: torch.Tensor, shape: torch.Size) -> None:
    if labels.shape != shape:
        raise ValueError(
            f"labels must have the input's shape (batch, length) = {tuple(shape)}, got {tuple(labels.shape)}."
        )


@torch.compiler.assume_constant_result
def _rows_are_shared_out() -> bool:
    """Whether DeepSpeed's sequence parallelism (Ulysses) has begun in this process."""
    parallel = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    return getattr(parallel, "_SEQUENCE_PARALLEL_GROUP", None) is not None


def check_inputs(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    vocab_size: int,
    hidden_size: int,
    prefix: str = "",
) -> None:
    """Exactly one of `input_ids` (B, L) and `inputs_embeds` (B, L, hidden_size), with at least one row and one token.

    `prefix` stands before their names in messages.

    Raises:
        TypeError: `input_ids` are not integers.
        ValueError: none or both given, wrong shape, no row or token, or ids outside the vocabulary; or DeepSpeed
            shares every row out.
    """
    if _rows_are_shared_out():
        raise ValueError(
            "DeepSpeed's sequence parallelism (sp_size > 1) gives each process a shard of every row, and exchanges "
            "keys and values alone: recurrences and windows of these models would begin anew in each shard."
        )
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"You must specify exactly one of {prefix}input_ids or {prefix}inputs_embeds.")
    for name, tensor in (("input_ids", input_ids), ("inputs_embeds", inputs_embeds)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{prefix}{name} must be a tensor, got {type(tensor).__name__}.")
    if input_ids is not None:
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"{prefix}input_ids must have shape (batch ≥ 1, length ≥ 1), got {tuple(input_ids.shape)}."
            )
        check_token_ids(f"{prefix}input_ids", input_ids, vocab_size)
    if inputs_embeds is not None:
        if inputs_embeds.dim() != 3 or 0 in inputs_embeds.shape[:2] or inputs_embeds.shape[2] != hidden_size:
            raise ValueError(
                f"{prefix}inputs_embeds must have shape (batch ≥ 1, length ≥ 1, {hidden_size}), got "
                f"{tuple(inputs_embeds.shape)}."
            )
        if not inputs_embeds.is_floating_point():
            raise TypeError(
                f"{prefix}inputs_embeds must be floating point, got {inputs_embeds.dtype}; token ids go to input_ids."
            )


def check_position_ids(position_ids: torch.Tensor, batch: int, length: int) -> None:
    """`position_ids` (B or 1, L) integer.

    Raises:
        TypeError: not an integer tensor.
        ValueError: another shape.
    """
    check_integers("position_ids", position_ids)
    if position_ids.shape != (batch, length) and position_ids.shape != (1, length):
        raise ValueError(
            f"position_ids must have shape (batch or 1, length) = ({batch}, {length}), got "
            f"{tuple(position_ids.shape)}."
        )
