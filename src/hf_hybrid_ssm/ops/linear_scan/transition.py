"""The matrix A of a recurrence in the form it has: real or complex numbers on the diagonal, or a dense real matrix."""

from typing import NamedTuple

import torch


def power(base: torch.Tensor, exponent: int | torch.Tensor) -> torch.Tensor:
    """base^k for k >= 0. Complex powers go through the logarithm of a square, which 0 and what underflows do not have;
    they are taken as a number that is too small to matter."""
    if base.is_complex():
        base = base + (1e-150 if base.dtype == torch.complex128 else 1e-17)
    return torch.pow(base, exponent)


def power_table(base: torch.Tensor, start: int, step: int, count: int) -> torch.Tensor:
    """base^{start + step j} for j < count, (..., count, N) of base (..., N), by doubling: complex numbers multiply
    many times faster than `torch.pow` raises them."""
    table, ratio = power(base, start).unsqueeze(-2), power(base, step).unsqueeze(-2)
    while table.shape[-2] < count:
        table = torch.cat([table, table * ratio], dim=-2)
        ratio = ratio * ratio
    return table[..., :count, :]


class Transition(NamedTuple):
    """A linear map on real states (..., N), batched over leading dimensions.

    Args:
        value: "real": (..., N), the diagonal. "complex": (..., N / 2, 2), the diagonal as real and imaginary parts;
            the state holds N / 2 complex numbers, real and imaginary part next to each other. "dense": (..., N, N), A
            transposed, so that a row of states times it is the next row.
        form: "real", "complex" or "dense".
    """

    value: torch.Tensor
    form: str

    def to(self, dtype: torch.dtype) -> "Transition":
        """The same, of real and imaginary parts in `dtype`."""
        return Transition(self.value.to(dtype), self.form)

    def diagonal(self) -> torch.Tensor:
        """(..., N) real or (..., N / 2) complex; not for a dense one."""
        return torch.view_as_complex(self.value.contiguous()) if self.form == "complex" else self.value

    def power(self, exponent: int | torch.Tensor) -> "Transition":
        """A^k of a diagonal one; a tensor of exponents broadcasts against the diagonal."""
        powers = power(self.diagonal(), exponent)
        return Transition(torch.view_as_real(powers) if self.form == "complex" else powers, self.form)

    def apply(self, states: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        """A s (or A^T s) for every row s of `states` (..., M, N)."""
        if self.form == "dense":
            return torch.matmul(states, self.value.mT if transposed else self.value)
        diagonal = self.diagonal().unsqueeze(-2)
        if self.form == "real":
            return states * diagonal
        state = torch.view_as_complex(states.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(state * (diagonal.conj() if transposed else diagonal)).flatten(-2)

    def krylov(
        self, vectors: torch.Tensor, count: int, *, start: int = 0, step: int = 1, transposed: bool = False
    ) -> torch.Tensor:
        """A^{start + step j} v for j < count, (..., count, N) of v (..., N): one product with a table of powers.

        The powers are taken in the precision of the diagonal and rounded at the end to that of the vectors. A dense
        matrix has `krylov_by_doubling` instead.
        """
        powers = power_table(self.diagonal(), start, step, count)
        if self.form == "real":
            return powers.to(vectors.dtype) * vectors.unsqueeze(-2)
        states = torch.view_as_complex(vectors.contiguous().unflatten(-1, (-1, 2))).unsqueeze(-2)
        powers = (powers.conj() if transposed else powers).to(states.dtype)
        return torch.view_as_real(powers * states).flatten(-2)

    def krylov_by_doubling(
        self, vectors: torch.Tensor, count: int, *, transposed: bool = False
    ) -> tuple[torch.Tensor, "Transition"]:
        """Of a dense one, `vectors` (..., M, N) times A^0, A^1, ..., A^{count - 1}, and A^count; a power of two.

        Rows and power stand in one matrix, so that each doubling is one product.
        """
        size = vectors.shape[-1]
        stack = torch.cat([vectors, self.value.mT if transposed else self.value], dim=-2)
        for _ in range(count.bit_length() - 1):
            product = torch.matmul(stack, stack[..., -size:, :])
            stack = torch.cat([stack[..., :-size, :], product], dim=-2)
        last = stack[..., -size:, :]
        return stack[..., :-size, :], Transition(last.mT if transposed else last, self.form)

    def powers_of_two(self, largest: int) -> tuple["Transition", ...]:
        """A^1, A^2, A^4, ..., A^largest of a dense one."""
        powers = [self.value]
        while 1 << len(powers) <= largest:
            powers.append(torch.matmul(powers[-1], powers[-1]))
        return tuple(Transition(value, self.form) for value in powers)
