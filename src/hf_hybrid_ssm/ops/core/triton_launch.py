"""Launches that come again and again: what Triton works out in Python at each of them is remembered.

A step's kernel takes some microseconds, and binding its arguments takes Triton longer. So the program that a launch
came to is kept by all that Triton tells programs apart by, and launched as Triton launches it (`CompiledKernel.run`,
the same in every version that `python -m tests.reporting triton` takes).
"""

import functools
from typing import Any

import torch
import triton
from triton.runtime import driver

from hf_hybrid_ssm.ops.core.triton_helpers import INTERPRETING

ALIGNMENT = 16  # bytes; programs differ by whether addresses are multiples of it
_LAUNCHERS: list["Launcher"] = []


class Launcher:
    """Launches one kernel, whose parameters are pointers, then whole numbers, then constants."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.known: dict[tuple, tuple] = {}
        _LAUNCHERS.append(self)

    def __call__(self, programs: int, tensors: tuple[Any, ...], numbers: tuple[int, ...], constants: dict) -> None:
        """Launch so many programs on the device of the first tensor.

        Args:
            tensors: the pointers; the first of them is not None.
            numbers: those that follow them.
            constants: by name, with options of the compiler such as `num_warps`.
        """
        device = tensors[0].get_device()
        if several_devices() and device >= 0:
            with torch.cuda.device(device):
                self._launch(device, programs, tensors, numbers, constants)
        else:
            self._launch(device, programs, tensors, numbers, constants)

    def _launch(self, device: int, programs: int, tensors: tuple, numbers: tuple, constants: dict) -> None:
        aligned = 0
        kinds: list[torch.dtype | None] = []
        for tensor in tensors:
            if tensor is None:
                kinds.append(None)
            else:
                aligned = 2 * aligned + (tensor.data_ptr() % ALIGNMENT == 0)
                kinds.append(tensor.dtype)
        key = (device, aligned, *numbers, *kinds, *constants.values())
        known = self.known.get(key)
        if known is not None and not triton.knobs.runtime.launch_enter_hook.calls:  # those of a profiler
            run, function, metadata, stream, following = known
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *tensors, *numbers, *following)
            return
        compiled = self.kernel[(programs,)](*tensors, *numbers, **constants)
        if not INTERPRETING.value:
            following = tuple(constants[name] for name in self.kernel.arg_names if name in constants)
            stream = driver.active.get_current_stream
            self.known[key] = compiled.run, compiled.function, compiled.packed_metadata, stream, following


@functools.cache
def several_devices() -> bool:
    return torch.cuda.device_count() > 1


def forget() -> None:
    """Have Triton work every launch out anew."""
    for launcher in _LAUNCHERS:
        launcher.known.clear()
