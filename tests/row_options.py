"""The ops as tests call them: padding, documents and the wish for a state are keywords here, which tables of problems
hold beside the other arguments."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from hf_hybrid_ssm.ops.core.rows import Rows

OF_ROWS = ("seq_idx", "lengths", "return_final_state")


def with_rows(options: dict[str, Any]) -> dict[str, Any]:
    """Options with `Rows` in place of the keywords that it is made of."""
    rows = {name: options[name] for name in OF_ROWS if name in options}
    others = {name: value for name, value in options.items() if name not in rows}
    return others | ({"rows": Rows.of(**rows)} if rows else {})


def mix(mixer: nn.Module, u: Any, **options: Any) -> Any:
    """`mixer(u, ...)`."""
    return mixer(u, **with_rows(options))


def _by_keywords(module: str, name: str) -> Callable[..., Any]:
    op = getattr(import_module(f"hf_hybrid_ssm.ops.{module}"), name)

    @functools.wraps(op)
    def call(*tensors: Any, **options: Any) -> Any:
        return op(*tensors, **with_rows(options))

    return call


causal_conv = _by_keywords("causal_conv", "causal_conv")
diagonal_scan = _by_keywords("linear_scan", "diagonal_scan")
implicit_attention = _by_keywords("implicit_attention", "implicit_attention")
legendre_memory = _by_keywords("legendre_memory", "legendre_memory")
local_attention = _by_keywords("local_attention", "local_attention")
long_conv = _by_keywords("long_conv", "long_conv")
longhorn_scan = _by_keywords("longhorn_scan", "longhorn_scan")
lti_scan = _by_keywords("linear_scan", "lti_scan")
