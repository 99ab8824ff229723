"""The product, and the examples on which kernels are compared with it."""

from typing import NamedTuple

import torch

from hf_hybrid_ssm.ops.core.self_check import draw


class Int8Inputs(NamedTuple):
    """x (R, I), codes int8 (O, I), scales (O,)."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


def int8_product_reference(inputs: Int8Inputs) -> tuple[torch.Tensor]:
    """As `hf_hybrid_ssm.ops.int8_product.int8_product`."""
    x, codes, scales = inputs.x.detach(), inputs.codes, inputs.scales.detach()
    return (x @ (codes.to(x.dtype) * scales[:, None]).T,)


def _example(rows: int, columns: int) -> Int8Inputs:
    drawn = draw({"x": (rows, columns), "codes": (21, columns), "scales": (21,)})
    return Int8Inputs(drawn["x"], (40 * drawn["codes"]).clamp(-127, 127).to(torch.int8), drawn["scales"])


EXAMPLES = (lambda: _example(1, 64), lambda: _example(7, 147))
