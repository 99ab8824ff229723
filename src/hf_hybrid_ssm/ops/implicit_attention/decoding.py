"""Decoding with deferred updates of the memory: what a cache keeps of a layer, and one token from there.

Advancing a memory by one token costs 2 q² operations a channel; to read the 3 q' rows of the j-th token after it,
W A^{j+1} times the memory, costs 6 q' q. So the C kernel advances the memory once in a block of C tokens and keeps the
tokens since. Every other backend advances it with every token; `apply_deferred` gives it such a memory.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.dispatch import REGISTRY
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.legendre_memory.constants import BlockOperators, block_operators
from hf_hybrid_ssm.ops.legendre_memory.torch_backend import BLOCK, advanced

DECODE = "decode_token"  # what a backend is given that does
LAGGING = ("memory", "recent", "pending")


def is_exact_gelu(activation: Callable) -> bool:
    """Whether it is `F.gelu` without the approximation by tanh, as a function or one of the usual modules."""
    function = getattr(activation, "act", activation)  # transformers' GELUActivation holds it
    is_module = isinstance(function, torch.nn.GELU) and function.approximate == "none"
    return function is F.gelu or is_module


def decoder(x: torch.Tensor, activation: Callable) -> Callable | None:
    """The function that decodes tokens like x (B, L, D) with deferred updates, where this backend has one."""
    run = REGISTRY["implicit_attention"].select(x.device.type, x.dtype)
    return getattr(run, DECODE, None) if is_exact_gelu(activation) else None


def defer_updates(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """The states of a memory (B, q, D) with no deferred tokens: recent (B, C, D) holds these, pending (B,) counts."""
    recent = memory.new_zeros(memory.shape[0], BLOCK, memory.shape[2])
    pending = torch.zeros(memory.shape[0], dtype=torch.int64, device=memory.device)
    return {"memory": memory, "recent": recent, "pending": pending}


def apply_deferred(states: dict[str, torch.Tensor], theta: float) -> torch.Tensor | None:
    """The memory (B, q, D) after all tokens, or None without states."""
    memory, recent = states.get("memory"), states.get("recent")
    if memory is None or recent is None:
        return memory
    with without_autocast(memory.device.type):
        constants = block_operators(memory.shape[1], theta, BLOCK, memory.dtype, device=memory.device)
        return advanced(memory, recent, states["pending"], BlockOperators(*constants))
