"""How many operations a call dispatches: what decoding on a CPU, and every launch on a GPU, costs.

Views and bare allocations move no data and launch nothing; they are not counted. A kernel of this package is one
custom operation and counts once.
"""

from collections import Counter
from collections.abc import Callable

from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh")
FREE = {*ALLOCATIONS, "_unsafe_view"}  # no view by its schema; torch's matmul takes it in more places from 2.15 on


def is_free(operation) -> bool:
    """A view (its result shares memory with an argument that is not written to) or an allocation."""
    views = any(result.alias_info and not result.alias_info.is_write for result in operation._schema.returns)
    return views or operation.overloadpacket.__name__ in FREE


class OperationCounter(TorchDispatchMode):
    """Counts by name: `with OperationCounter() as counter: ...; counter.counts.total()`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not is_free(operation):
            self.counts[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


def count_operations(run: Callable[[], object]) -> Counter[str]:
    """Operations that `run()` dispatches, by name."""
    with OperationCounter() as counter:
        run()
    return counter.counts
