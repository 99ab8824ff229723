"""Tensors that follow from sizes alone, cached per device to avoid a host-to-device copy that synchronises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only


def constant(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make(*arguments)` becomes `get(*arguments, device=None)`, computed once for the same arguments and device.

    Args:
        make: from hashable arguments to a number, a tensor on the CPU, or a tuple of these.

    What `get` returns is shared and must not be written to. Whatever is active where it is first needed (a trace,
    inference mode, a transform), all may use it. To `torch.compile` it is a constant, in a fake mode a fake tensor.
    """

    @lru_cache
    def computed(*arguments: Any, device: torch.device | None) -> Any:
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            torch._C._DisableFuncTorch(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            return tree_map_only(torch.Tensor, lambda made: made.to(device), make(*arguments))

    def looked_up(*arguments: Any, device: torch.device | None) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return computed(*arguments, device=device)
        return tree_map_only(torch.Tensor, lambda real: _fake(real, device), computed(*arguments, device=None))

    # dynamo names a tensor by the function that returned it, and stops where two have one name; what it finds in a
    # tuple has the name of the tuple, of which there are as many as it takes
    @torch.compiler.assume_constant_result
    def in_tuple(*arguments: Any, device: torch.device | None) -> tuple:
        return (looked_up(*arguments, device=device),)

    @torch.compiler.allow_in_graph
    def of_graph(*arguments: Any, device: torch.device | None) -> Any:
        return looked_up(*arguments, device=device)

    def get(*arguments: Any, device: torch.device | None = None) -> Any:
        if _are_of_graphs:
            return of_graph(*arguments, device=device)
        return in_tuple(*arguments, device=device)[0]

    return get


_are_of_graphs = False


@contextmanager
def constants_of_graphs() -> Iterator[None]:
    """What is compiled within has its constants as numbers of the graph, which is then right in other processes too.

    Otherwise they are inputs of the graph, which dynamo computes while it traces: on their device, and under a name by
    which torch finds the graph in its own cache.
    """
    global _are_of_graphs
    before, _are_of_graphs = _are_of_graphs, True
    try:
        yield
    finally:
        _are_of_graphs = before


def _fake(real: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """The tensor of a trace, which may be for a device that is not here: `Tensor.to` would look for it."""
    fake = torch.ops.aten.lift_fresh(real)
    return fake if device in (None, fake.device) else torch.ops.aten._to_copy(fake, device=device)
