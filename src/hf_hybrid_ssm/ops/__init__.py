"""The lowest level: functions from tensors to tensors, `from hf_hybrid_ssm.ops import longhorn_scan`.

Layout (batch, length, channels); dimension letters B batch, L length, D channels, N state size, H heads, W window,
C block length, K short-convolution width. Every op has a float64 reference that reads like the paper's equation.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_hybrid_ssm.ops.causal_conv import causal_conv
    from hf_hybrid_ssm.ops.core.rows import Rows
    from hf_hybrid_ssm.ops.implicit_attention import implicit_attention
    from hf_hybrid_ssm.ops.legendre_memory import legendre_memory
    from hf_hybrid_ssm.ops.linear_cross_entropy import linear_cross_entropy
    from hf_hybrid_ssm.ops.linear_kl_divergence import linear_kl_divergence
    from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition, diagonal_scan, lti_scan
    from hf_hybrid_ssm.ops.local_attention import local_attention
    from hf_hybrid_ssm.ops.long_conv import long_conv
    from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

__all__ = [
    "ChannelSystem",
    "Rows",
    "Transition",
    "causal_conv",
    "diagonal_scan",
    "implicit_attention",
    "legendre_memory",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "local_attention",
    "long_conv",
    "longhorn_scan",
    "lti_scan",
]
_OF_LINEAR_SCAN = ("ChannelSystem", "Transition", "diagonal_scan", "lti_scan")
_MODULES = dict.fromkeys(_OF_LINEAR_SCAN, "linear_scan") | {"Rows": "core.rows"}  # others are named as what they hold


class _Ops(ModuleType):
    """A public name is the function, imported when it is first asked for. Python binds a submodule to its own name in
    its package as soon as anything imports it: here it does not take the place of the function, so `import
    hf_hybrid_ssm.ops.longhorn_scan as name` gives that too."""

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


def _public(name: str) -> property:
    module = f"{__name__}.{_MODULES.get(name, name)}"
    return property(lambda ops: getattr(importlib.import_module(module), name), lambda ops, submodule: None)


for _name in __all__:
    setattr(_Ops, _name, _public(_name))
sys.modules[__name__].__class__ = _Ops
