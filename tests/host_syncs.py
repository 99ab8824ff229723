"""Where a call makes the host wait for the device: an accelerator's queue then runs dry.

On a CPU nothing waits, so the reads themselves are found: operations whose result, or its shape, the host needs before
it can go on, and the methods of a tensor that read it without dispatching an operation.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hybrid_ssm.ops.core import checks

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select"}
READS |= {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount", "histc"}
# of these the innermost: what transformers asks inside of `generate` is its own
ASKING = ("hf_hybrid_ssm", "transformers/generation")
METHODS = ("tolist", "numpy", "__array__")


def _reads(operation, args: tuple, kwargs: dict) -> bool:
    name = operation.overloadpacket.__name__
    if name == "repeat_interleave":
        return operation._overloadname == "Tensor" and kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # a mask's shape is the number of its ones
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "lift_fresh":  # a table made of numbers of the host is copied, while a single number travels alone
        return args[0].dim() > 0 and args[0].numel() > 0
    return name in READS


class _Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "torch/" not in frame.filename][:-2]
        asking = [frame for frame in frames if any(name in frame.filename for name in ASKING)] or frames
        self.places.append(f"{what} in {asking[-1].name} at {asking[-1].filename}:{asking[-1].lineno}")

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if _reads(operation, args, kwargs or {}):
            self.note(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Tensors count as lying on a device whose values cost a wait: checks of values are left out, as there."""
    with mock.patch.object(checks, "is_on_host", lambda tensor: False):
        yield


def host_syncs(run: Callable[[], object]) -> list[str]:
    """Each read of a tensor's values that `run()` makes, with the line of this package that asked for it."""
    with as_on_an_accelerator(), _Reads() as reads, _patched_methods(reads):
        run()
    return reads.places


@contextmanager
def _patched_methods(reads: _Reads) -> Iterator[None]:
    with mock.patch.multiple(torch.Tensor, **{name: _noting(name, reads) for name in METHODS}):
        yield


def _noting(name: str, reads: _Reads) -> Callable:
    method = getattr(torch.Tensor, name)

    def read(tensor: torch.Tensor, *args, **kwargs):
        reads.note(name)
        return method(tensor, *args, **kwargs)

    return read
