"""Floating-point operations of what runs on tensors of any kind, by op."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper


def _real_fourier(shape: Any, dims: Any, *_: Any, out_shape: Any = None, **__: Any) -> float:
    return _fourier(max(shape, out_shape, key=math.prod), dims, 2.5)


def _complex_fourier(shape: Any, dims: Any, *_: Any, **__: Any) -> float:
    return _fourier(shape, dims, 5.0)


def _fourier(shape: Any, dims: Any, factor: float) -> float:
    """factor n log2 n for each transform of n points."""
    points = math.prod(shape[dim] for dim in dims)
    return factor * math.prod(shape) * math.log2(max(points, 2))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
    return 2.5 * _attention(query, key, value)  # scores once more, then four products


def _formulas() -> dict[Any, Callable]:
    """What torch's own counter leaves out: Fourier transforms, and the CPU's fused attention."""
    aten = torch.ops.aten
    return {
        aten._fft_r2c: _real_fourier,
        aten._fft_c2r: _real_fourier,
        aten._fft_c2c: _complex_fourier,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }


FORMULAS = _formulas()
KINDS = {
    "_fft": "Fourier transforms",
    "_scaled_dot_product": "attention",
    "implicit_attention": "attention",
    "local_attention": "attention",
    "longhorn_scan": "recurrence",
    "lti_scan": "recurrence",
    "diagonal_scan": "recurrence",
}


class Operations(TorchDispatchMode):
    """Counts them while it is entered, with torch's formulas and those above.

    torch's `FlopCounterMode` finds the module of each too, which takes as long as a step on fake tensors itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self._formulas = flop_registry | {op: shape_wrapper(formula) for op, formula in FORMULAS.items()}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if formula := self._formulas.get(op.overloadpacket):
            self.counts[op.overloadpacket] += formula(*args, **kwargs, out_val=result)
        return result


def by_kind(of_base: Mapping[Any, float], total: float) -> dict[str, float]:
    """Operations of the base model by kind of op, and of the head: the rest of the total."""
    by_kind = dict.fromkeys(("matrix products", *KINDS.values(), "head"), 0.0)
    for op, count in of_base.items():
        name = str(op).split(".")[-1]
        by_kind[next((kind for start, kind in KINDS.items() if name.startswith(start)), "matrix products")] += count
    by_kind["head"] = total - sum(by_kind.values())
    return by_kind
