"""States of many texts in one memory: one token of some of them goes on from their pages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.checks import can_read_values, check_overwritten, check_tensor

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


def gathers_pages(step: Callable[[Any], tuple[Tensor, Tensor]]) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """A step that overwrites contiguous states (B, ...), given states in pages: they are gathered for it, and put back
    after it."""

    @wraps(step)
    def run(inputs: Any) -> tuple[Tensor, Tensor]:
        if inputs.pages is None:
            return step(inputs)
        rows = inputs.state.index_select(0, inputs.pages)
        y, _ = step(inputs._replace(state=rows, pages=None))
        inputs.state.index_copy_(0, inputs.pages, rows)
        return y, inputs.state

    return run


def held_state(
    state: Tensor | PagedState | None, like: Tensor, shape: tuple[int, ...], letters: str
) -> tuple[Tensor | None, Tensor | None]:
    """An op's `initial_state` of that shape behind the rows or pages, and the pages (B,) of a paged one.

    Raises:
        TypeError, ValueError: of wrong type, shape or device.
    """
    if isinstance(state, PagedState):
        check_tensor("initial_state.memory", state.memory, (None, *shape), f"P, {letters}", beside=like)
        return state.memory, state.pages
    check_tensor("initial_state", state, (like.shape[0], *shape), f"B, {letters}", beside=like, optional=True)
    return state, None


def run_step(run: Callable[[Any], tuple[Tensor, Tensor]], inputs: Any, overwrites: bool) -> tuple[Tensor, Tensor]:
    """y of one token of each row, and the state after it: the one that is given, which is overwritten, or a copy.

    Args:
        run: an implementation, which overwrites the state.
        inputs: the op's; those with pages are overwritten.
        overwrites: as of `Rows`.
    """
    if inputs.pages is not None:
        check_pages(inputs.pages, len(inputs[0]), inputs.state)
    elif overwrites:
        check_overwritten("initial_state", inputs.state, dense="contiguous")
    else:
        inputs = inputs._replace(state=inputs.state.clone(memory_format=torch.contiguous_format))
    return run(inputs)[0], inputs.state
