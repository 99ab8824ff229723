"""Mistakes in the use of the public API, each with the answer that it must get."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

Mistakes = Sequence[tuple[Any, ...]]


def mistakes(table: Mistakes, names: str = "call, answer") -> pytest.MarkDecorator:
    """Parametrises a test over rows that end with "Exception: regular expression of its message"."""
    return pytest.mark.parametrize(names, table, ids=[row[-1] for row in table])


def assert_refused(call: Callable[[], object], answer: str) -> None:
    """The exception is of the kind that is named, and says the argument, and its value or what is right."""
    kind, _, words = answer.partition(": ")
    with pytest.raises(Exception, match=f"(?s){words}") as raised:
        call()
    names = {name.__name__ for name in type(raised.value).__mro__}
    assert kind in names, f"{type(raised.value).__name__} instead of {kind}: {raised.value}"
