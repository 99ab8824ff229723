"""Complex numbers as real and imaginary parts side by side."""

import torch


def product_of_pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """(..., 2 n) each, which broadcast → (..., 2 n), the products of n pairs of complex numbers.

    In a program that a compiler makes by real operations: it fuses them, and other runtimes know no complex numbers.
    """
    a, b = (pairs.unflatten(-1, (-1, 2)) for pairs in (first, second))
    if torch.compiler.is_compiling():
        (a, b), (c, d) = a.unbind(-1), b.unbind(-1)
        return torch.stack([a * c - b * d, a * d + b * c], -1).flatten(-2)
    product = torch.view_as_complex(a.contiguous()) * torch.view_as_complex(b.contiguous())
    return torch.view_as_real(product).flatten(-2)
