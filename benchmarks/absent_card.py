"""A driver that lets Triton compile for a card that is not here.

The package's own launches decide what is compiled, how it is specialised and which sizes are tried. A program is
compiled for the card's generation, meets the limit of what it may share, and is not run. So tensors lie on the CPU,
and what a launch would write stays as it was.

A process has one driver: `install` is for a process of its own. Triton reads TRITON_CACHE_DIR as on a card.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that a program may share, by compute capability."""
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
Compile = Callable[..., Any]


class Utilities:
    """What Triton asks of a device before it launches."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self.capability]}

    def load_binary(self, *program: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and the threads that a program may have."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        """Asked for from Triton 3.9 on, when a program is let go."""


class Driver:
    def __init__(self, capability: int):
        self.utils = Utilities(capability)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.utils.capability, 32)


@dataclass(frozen=True)
class Specialisation:
    """What a launch asked the compiler for, and what came of it (None where nothing is compiled)."""

    kernel: JITFunction
    signature: dict[str, str]
    attributes: dict
    program: Any


_KERNELS: list[JITFunction] = []
NOTHING = SimpleNamespace(
    function=1, packed_metadata=(), run=lambda *_: None, launch_metadata=lambda *_: None
)  # stands where a compiled program would be


def install(capability: int, *, compiles: bool = True) -> list[Specialisation]:
    """Let launches take Triton's kernels on the CPU, for a card of this generation.

    Args:
        capability: of `SHARED`, 90 for Hopper.
        compiles: False only counts what would be compiled.

    Returns:
        What was asked for, one entry for each compilation (or program taken from Triton's cache); it grows.
    """
    asked: list[Specialisation] = []
    compile_anew: Compile = JITFunction._do_compile

    def note(kernel: JITFunction, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any,
             warmup: Any) -> Any:  # fmt: skip
        if compiles:
            program = compile_anew(kernel, key, signature, device, constants, options, attributes, warmup)
        else:
            kernel.device_caches[device][0][key] = program = NOTHING
        _KERNELS.append(kernel)
        asked.append(Specialisation(kernel, signature, attributes, program if compiles else None))
        return program

    driver.set_active(Driver(capability))
    JITFunction._do_compile = note
    _take_triton(capability)
    return asked


def _take_triton(capability: int) -> None:
    from hf_hybrid_ssm.ops.implicit_attention import triton as attention
    from hf_hybrid_ssm.ops.longhorn_scan import triton as scan

    for module in (attention, scan):
        module.multiprocessors = lambda device: MULTIPROCESSORS[capability]
    for op in ops_with_kernels().values():
        op._load("triton")
        if isinstance(op._loaded["triton"], str):
            raise RuntimeError(f"{op.name}: {op._loaded['triton']}")
        op.select = _selecting(op)  # type: ignore[method-assign]


def ops_with_kernels() -> dict[str, Any]:
    """The ops with Triton kernels of the package, by name; FlexAttention's are torch's."""
    from hf_hybrid_ssm.doctor import every_op

    modules = {name: op.kernels.get("triton", "") for name, op in every_op().items()}
    return {name: every_op()[name] for name, module in modules.items() if module and "flex_attention" not in module}


def _selecting(op: Any) -> Callable:
    def select(device_type: str, dtype: torch.dtype, requested: str | None = None) -> Callable:
        return op.builtin[requested] if requested in op.builtin else op._loaded["triton"]

    return select


def forget() -> None:
    """Have every launch ask anew, and begin with the largest sizes."""
    from hf_hybrid_ssm.ops.core import triton_helpers, triton_launch

    triton_helpers._FITTING.clear()
    triton_launch.forget()
    for kernel in list(_KERNELS):
        kernel.device_caches.clear()
    _KERNELS.clear()


def launch_example(op: Any, given: Any, dtype: torch.dtype) -> None:
    """What a self-check launches of an op's example, and its backward."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).requires_grad_(op.differentiable) if tensor.is_floating_point() else tensor

    outputs = op._loaded["triton"](tree_map_only(torch.Tensor, leaf, given))
    if op.differentiable:
        sum(part.sum() for part in outputs if part is not None).backward()
