"""Parameter groups for AdamW: which parameters are decayed, and which have their own learning rate."""

from typing import Any

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float, *, lr: float | None = None) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: `torch.optim.AdamW(parameter_groups(model, 0.1, lr=1e-3))`.

    Tensors with two or more dimensions are decayed; norms, biases (also several in one tensor, such as T5's relative
    ones: the name of the parameter or of its module says so) and other vectors are not. A parameter can override this
    with an attribute `_optim`, and a module for its own parameters with a method `optimizer_options(name)`, as the
    state-space mixers do: a dict of optimizer options such as `{"lr": 1e-3, "weight_decay": 0.0}`. The module's
    options also apply after FSDP has replaced the parameters by shards. Frozen parameters are left out; tied ones
    appear once. The order depends only on the model, so that a saved optimizer state can be loaded.

    Args:
        model: the model to train.
        weight_decay: of the decayed parameters, ≥ 0.
        lr: learning rate of parameters without their own; `None` leaves it to the optimizer.

    Returns:
        One dict for each distinct set of options, with `params` and those options.

    Raises:
        ValueError: `weight_decay` or `lr` is negative, or the model has no trainable parameters.
    """
    if weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay} must be at least 0.")
    if lr is not None and lr < 0:
        raise ValueError(f"lr={lr} must be at least 0.")
    groups: dict[tuple, dict[str, Any]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_bias = any("bias" in part for part in (name, path.rpartition(".")[2]))
            decay = weight_decay if parameter.dim() >= 2 and not is_bias else 0.0
            options = _options(module, name, parameter, decay, lr)
            group = groups.setdefault(tuple(sorted(options.items())), {"params": [], **options})
            group["params"].append(parameter)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True.")
    return list(groups.values())


def _options(
    module: nn.Module, name: str, parameter: torch.Tensor, weight_decay: float, lr: float | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"weight_decay": weight_decay}
    if lr is not None:
        options["lr"] = lr
    if callable(own := getattr(module, "optimizer_options", None)):
        options |= own(name)
    return options | getattr(parameter, "_optim", {})
