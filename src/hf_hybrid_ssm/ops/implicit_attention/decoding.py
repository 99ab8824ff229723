"""Memories whose updates are deferred: what a cache keeps of a layer, and one token from there.

Advancing a memory by one token costs 2 q² operations a channel; to read the 3 q' rows of the j-th token after it,
W A^{j+1} times the memory, costs 6 q' q. So the C kernel advances the memory once in a block of C tokens and keeps the
tokens since. Every other backend advances it with every token; `apply_deferred` gives it such a memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.dispatch import REGISTRY
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.legendre_memory.constants import BlockOperators, block_operators
from hf_hybrid_ssm.ops.legendre_memory.torch_backend import BLOCK, advanced

DECODE = "decode_token"  # what a backend is given that does


class DeferredMemory(NamedTuple):
    """A memory, and the tokens since.

    Args:
        memory: (B, q, D), after all tokens but the deferred ones.
        recent: (B, C, D), which holds these.
        pending: (B,) int64, how many there are.
    """

    memory: torch.Tensor
    recent: torch.Tensor
    pending: torch.Tensor


def is_exact_gelu(activation: Callable) -> bool:
    """Whether it is `F.gelu` without the approximation by tanh, as a function or one of the usual modules."""
    function = getattr(activation, "act", activation)  # transformers' GELUActivation holds it
    is_module = isinstance(function, torch.nn.GELU) and function.approximate == "none"
    return function is F.gelu or is_module


def decoder(x: torch.Tensor, activation: Callable, backend: str | None = None) -> Callable | None:
    """The function that decodes tokens like x (B, L, D) with deferred updates, where this backend has one."""
    run = REGISTRY["implicit_attention"].select(x.device.type, x.dtype, backend)
    return getattr(run, DECODE, None) if is_exact_gelu(activation) else None


def defer_updates(memory: torch.Tensor) -> DeferredMemory:
    """A memory (B, q, D) with no deferred tokens."""
    recent = memory.new_zeros(memory.shape[0], BLOCK, memory.shape[2])
    pending = torch.zeros(memory.shape[0], dtype=torch.int64, device=memory.device)
    return DeferredMemory(memory, recent, pending)


def named_memory(
    memory: torch.Tensor | DeferredMemory | None, x: torch.Tensor, activation: Callable
) -> dict[str, torch.Tensor]:
    """A final state as a cache keeps it, its tensors by name, with deferred tokens where a backend decodes tokens like
    x so; of None nothing."""
    if memory is None:
        return {}
    if isinstance(memory, torch.Tensor):
        if decoder(x, activation) is None:
            return {"memory": memory}
        memory = defer_updates(memory)
    return memory._asdict()


def memory_state(states: dict[str, torch.Tensor]) -> torch.Tensor | DeferredMemory | None:
    """The state among the tensors of a cache, by the names of `named_memory`; None if there is none."""
    if "recent" in states:
        return DeferredMemory(states["memory"], states["recent"], states["pending"])
    return states.get("memory")


def apply_deferred(state: DeferredMemory, theta: float) -> torch.Tensor:
    """The memory (B, q, D) after all tokens."""
    memory, recent, pending = state
    with without_autocast(memory.device.type):
        constants = block_operators(memory.shape[1], theta, BLOCK, memory.dtype, device=memory.device)
        return advanced(memory, recent, pending, BlockOperators(*constants))
