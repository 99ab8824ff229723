"""Gradients of weights in bfloat16 are sums over all tokens, added up in float32 and rounded once.

Each token adds as much as every other. A sum kept in bfloat16 stops to grow at 256 of them: 257 is no number there.
"""

import pytest
import torch

from hf_hybrid_ssm.ops.core.dispatch import REGISTRY, backend
from hf_hybrid_ssm.ops.linear_kl_divergence import linear_kl_divergence
from tests.ops.test_transforms import OPS as OPS_OF_SHORT_ROWS

TOKENS, WIDTH = 3000, 3
ROUNDING = 2.0**-8


def divergence(hidden, weight):
    teacher = torch.eye(7, WIDTH, dtype=weight.dtype)
    return linear_kl_divergence(hidden, weight, hidden.detach().flip(-1), teacher, chunk_size=5)


# those whose weights may be bfloat16: a function of inputs (B, L, D) and weights, and the shapes of these
OPS = {
    name: (OPS_OF_SHORT_ROWS[name][0], OPS_OF_SHORT_ROWS[name][1][1:])
    for name in (
        "causal_conv",
        "long_conv fft",
        "long_conv two-sided",
        "legendre_memory",
        "implicit_attention",
        "linear_cross_entropy",
    )
} | {"linear_kl_divergence": (divergence, [(7, WIDTH)])}
CASES = [
    (case, name)
    for case in OPS
    for name in ("torch", "native")
    if name == "torch" or "native" in getattr(REGISTRY.get(case.split()[0]), "kernels", {})
]


def gradients(case: str, inputs: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in weights]
    return list(torch.autograd.grad(OPS[case][0](inputs, *leaves).sum(), leaves))


@pytest.mark.parametrize(("case", "name"), CASES)
def test_of_weights(case, name):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(1, 1, WIDTH, generator=generator).bfloat16().expand(2, TOKENS, WIDTH)  # one token, repeated
    weights = [torch.rand(shape, generator=generator).bfloat16() for shape in OPS[case][1]]
    with backend("torch"):
        wanted = gradients(case, inputs.double(), [weight.double() for weight in weights])
    with backend(name):
        found = gradients(case, inputs, weights)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(
            one.double(), other, rtol=4 * ROUNDING, atol=4 * ROUNDING * float(other.abs().max())
        )
