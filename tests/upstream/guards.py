"""What transformers' own tests say in their first lines about the classes that they are not for.

    def test_attention_outputs(self):
        if not self.has_attentions:
            self.skipTest(reason="Model does not output attentions")

Such a test can be known to skip before it runs: only attributes of its class decide. So can one whose first line calls
a function that begins like this, with the test case as its first argument.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

import pytest

UPSTREAM = "transformers_upstream_tests."
Guard = tuple[CodeType, CodeType]
"""A condition, and the reason to skip if it holds; both of a test case called `self`."""


def reason_of_guards(item: pytest.Item) -> str | None:
    """Why the first lines of a test of transformers skip it for this class, or None where they do not or may not."""
    test_class = getattr(item, "cls", None)
    function = getattr(test_class, item.name, None)
    return None if function is None else reason_of(function, test_class)


def reason_of(function: Callable, test_class: Any) -> str | None:
    """Conditions that ask for more than the class has, such as what `setUp` makes, are left to the test itself."""
    function = inspect.unwrap(getattr(function, "place_as", function))  # as `parameterized` names what it repeats
    if not function.__module__.startswith(UPSTREAM):
        return None
    guards, inner = first_lines(function)
    case = _BeforeSetUp(test_class)
    for condition, reason in guards:
        try:
            if eval(condition, function.__globals__, {"self": case}):
                return str(eval(reason, function.__globals__, {"self": case}))
        except (AttributeError, TypeError, NameError):
            return None
    return None if inner is None else reason_of(function.__globals__[inner], test_class)


class _BeforeSetUp:
    """The attributes of a test case whose `setUp` has not run; None stands for what that makes."""

    def __init__(self, test_class: Any):
        self._case = test_class("__init__")

    def __getattr__(self, name: str) -> Any:
        if (value := getattr(self._case, name)) is None:
            raise AttributeError(name)
        return value


@cache
def first_lines(function: Callable) -> tuple[list[Guard], str | None]:
    """The guards that a function begins with, and the function of its module to which the line after them leads."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    guards: list[Guard] = []
    for statement in definition.body:
        match statement:
            case ast.Expr(ast.Constant()):  # the docstring
                continue
            case ast.If(test=condition, body=[ast.Expr(ast.Call(func=called) as call)], orelse=[]) if (
                ast.unparse(called) == "self.skipTest"
            ):
                reason = [*call.args, *(keyword.value for keyword in call.keywords)][0]
                guards.append((_compiled(condition), _compiled(reason)))
            case ast.Expr(ast.Call(func=ast.Name(id=inner), args=[ast.Name(id="self"), *_])):
                return guards, inner if inspect.isfunction(function.__globals__.get(inner)) else None
            case _:
                break
    return guards, None


def _compiled(expression: ast.expr) -> CodeType:
    return compile(ast.Expression(expression), "<guard>", "eval")
