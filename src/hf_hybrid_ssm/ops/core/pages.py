"""States of many texts in one memory: one token of some of them goes on from their pages."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.checks import can_read_values, check_tensor

REFUSES = "pages must lie within the memory of the states."


@dataclass(frozen=True, eq=False)
class PagedState:
    """The states of B rows in memory that they share with others: given to an op in the place of a state, they are
    overwritten where they lie.

    Args:
        memory: P pages (P, ...), which may lie apart.
        pages: (B,) int64, the page of each row, none twice.
    """

    memory: Tensor
    pages: Tensor


class Attend(Protocol):
    """A server's attention: it keeps the keys and values (B, G, L, E) of the next tokens, and gives what their queries
    (B, H, L, E) find among all so far, (B, L, H · E). Logits are scale · q·k + bias(i - j), the bias (H, R); perhaps
    they are capped, or have a column more, `s_aux` (H,). A server refuses what it does not have."""

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class ServedKeys:
    """The keys and values of all tokens of B rows, which a server keeps: given to full attention in the place of keys.

    Args:
        attend: the server's attention.
    """

    attend: Attend


def check_pages(pages: Tensor, batch: int, state: Tensor) -> None:
    """`pages` (B,) int64, a page of `state` (P, ...) for each row, none twice; the pages of `state` may lie apart.

    The values are checked only where they can be read.

    Raises:
        TypeError: not an int64 tensor.
        ValueError: wrong shape, device or value, or a page that is not contiguous.
    """
    check_tensor("pages", pages, (batch,), "B", beside=state)
    if pages.dtype != torch.int64:
        raise TypeError(f"pages must be int64, got {pages.dtype}.")
    if state.shape[0] and not state[0].is_contiguous():
        raise ValueError(f"state is overwritten and its pages must be contiguous, got strides {state.stride()}.")
    if batch and can_read_values(pages):
        numbers = sorted(pages.tolist())
        if not 0 <= numbers[0] <= numbers[-1] < state.shape[0] or len(set(numbers)) < batch:
            raise ValueError(f"pages must be different ones of 0..{state.shape[0] - 1}, got {pages.tolist()}.")


def on_pages(implementation: Callable, step: Callable[..., Tensor], state: Tensor, pages: Tensor) -> Tensor:
    """`step(state, pages=pages)` where the implementation of it has this parameter, else `on_rows`."""
    return step(state, pages=pages) if _takes_pages(implementation) else on_rows(step, state, pages)


def on_rows(step: Callable[[Tensor], Tensor], state: Tensor, pages: Tensor) -> Tensor:
    """A step that overwrites contiguous states (B, ...): they are gathered for it, and put back after it."""
    gathered = state.index_select(0, pages)
    y = step(gathered)
    state.index_copy_(0, pages, gathered)
    return y


@cache
def _takes_pages(implementation: Callable) -> bool:
    return "pages" in inspect.signature(implementation).parameters
