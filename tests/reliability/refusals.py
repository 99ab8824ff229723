"""Mistakes in the use of the public API, each with the answer that it must get."""

import re
from collections.abc import Callable, Sequence

import pytest

Mistakes = Sequence[tuple[Callable, str]]


def mistakes(table: Mistakes) -> pytest.MarkDecorator:
    """Parametrises a test over (call, "Exception: regular expression of its message")."""
    return pytest.mark.parametrize(("call", "answer"), table, ids=[answer for _, answer in table])


def assert_refused(call: Callable[[], object], answer: str) -> None:
    """The exception is of the kind that is named, and says the argument, and its value or what is right."""
    kind, _, words = answer.partition(": ")
    try:
        call()
    except Exception as error:
        names = {name.__name__ for name in type(error).__mro__}
        assert kind in names, f"{type(error).__name__} instead of {kind}: {error}"
        assert re.search(words, str(error), re.DOTALL), f"the message lacks {words!r}: {error}"
    else:
        raise AssertionError("it passes silently")
