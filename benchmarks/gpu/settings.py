"""What a run measures on: the card, or a CPU that rehearses every code path with tiny sizes."""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_hybrid_ssm.ops.core.dispatch import backend


@dataclass(frozen=True)
class Settings:
    """
    Args:
        device: "cuda" or "cpu".
        rehearse: sizes that a CPU runs in seconds.
        only_launches: for `compile_ahead`, which has no card: what a kernel's launch gives is not looked at.
    """

    device: str
    rehearse: bool
    only_launches: bool = False

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of models and kernels that are timed."""
        return torch.float32 if self.rehearse else torch.bfloat16

    @property
    def rounds(self) -> int:
        return 1 if self.rehearse else 15

    @property
    def has_triton(self) -> bool:
        """Whether Triton kernels can run here: a rehearsal interprets them where Triton is installed."""
        return importlib.util.find_spec("triton") is not None

    def pick(self, real, tiny):
        """A size of this run."""
        return tiny if self.rehearse else real

    def plain_torch(self) -> AbstractContextManager:
        """In a rehearsal everything but the kernels' own checks runs in torch: the interpreter is slow."""
        return backend("torch") if self.rehearse else nullcontext()
