"""Where weights lie in memory.

Bits of weights are what saving and loading promise. Bits of *outputs* follow only where the weights also lie alike: a
loaded safetensors file is memory-mapped, its tensors begin at any address, and the BLAS of a processor may add in
another order where an operand does not begin at a multiple of 64 bytes (with AMD Zen a logit then moves by 1e-8).
"""

from itertools import chain
from typing import TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def in_own_memory(model: ModuleT) -> ModuleT:
    """Move every parameter and buffer, in place, to memory of torch's allocator, which begins at such a multiple.

    Two models with the same bits of weights, both in memory of their own, give the same bits of outputs.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.clone()
    return model
