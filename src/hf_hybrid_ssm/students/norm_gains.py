"""What a norm multiplies the channels of its input by, whatever its weights are: some multiply by 1 + weight."""

from contextlib import ExitStack
from typing import Any

import torch

FAR = 1000.0
"""The size of a norm's input beside which what it adds under the root is nothing."""


@torch.no_grad()
def gain_of(norm: Any, size: int) -> torch.Tensor:
    """(size,) float64."""
    weight = next(norm.parameters())
    signs = 1 - 2 * (torch.arange(size, device=weight.device) % 2)
    x = (FAR * signs).to(weight.dtype)
    return (norm(x[None, None]) - norm(torch.zeros_like(x)[None, None]))[0, 0].double() * signs


@torch.no_grad()
def input_gains(model: Any, layers: dict[int, Any]) -> dict[int, torch.Tensor]:
    """Layer → (d,) float64, the gain of the norm whose output its attention reads; ones where it reads no norm's.

    Args:
        model: a language model of transformers.
        layers: its attention modules, by layer.
    """
    width = model.config.hidden_size
    outputs: dict[int, Any] = {}
    gains: dict[int, torch.Tensor] = {}
    norms = [module for module in model.base_model.modules() if "Norm" in type(module).__name__]
    one = torch.zeros(1, 1, dtype=torch.int64, device=model.device)

    def remember(module: Any, args: Any, output: torch.Tensor) -> None:
        outputs[id(output)] = module, output  # held, so that no other tensor has its place

    def look(index: int) -> Any:
        def see(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            read = args[0] if args else kwargs["hidden_states"]
            norm, output = outputs.get(id(read), (None, None))
            gains[index] = torch.ones(width, dtype=torch.float64, device=read.device)
            if output is read:
                gains[index] = gain_of(norm, width)

        return see

    with ExitStack() as after:
        for norm in norms:
            after.enter_context(norm.register_forward_hook(remember))
        for index, module in layers.items():
            hook = module.register_forward_pre_hook(look(index), with_kwargs=True, prepend=True)
            after.enter_context(hook)
        after.callback(model.train, model.training)
        model.eval().base_model(input_ids=one, use_cache=False)
    return gains
