"""The matrix A of a recurrence in the form it has: real or complex numbers on the diagonal, or a dense real matrix."""

from typing import NamedTuple

import torch


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

    def apply(self, rows: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        """A s (or A^T s) for every row s of `rows` (..., M, N)."""
        if self.form == "dense":
            return torch.matmul(rows, self.value.mT if transposed else self.value)
        if self.form == "real":
            return rows * self.value.unsqueeze(-2)
        diagonal = torch.view_as_complex(self.value).unsqueeze(-2)
        state = torch.view_as_complex(rows.unflatten(-1, (-1, 2)))
        return torch.view_as_real(state * (diagonal.conj() if transposed else diagonal)).flatten(-2)

    def squared(self) -> "Transition":
        """A^2."""
        if self.form == "dense":
            return Transition(torch.matmul(self.value, self.value), self.form)
        if self.form == "real":
            return Transition(self.value * self.value, self.form)
        diagonal = torch.view_as_complex(self.value)
        return Transition(torch.view_as_real(diagonal * diagonal), self.form)
