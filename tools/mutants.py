"""Small faults that can be made in a Python file, one at a time: what a tired person might have written instead.

Operators, constants and conditions that are off by one or turned round; options, statements and refusals that were
forgotten; arguments that were exchanged. Messages, docstrings, annotations and assertions stay as they are.
"""

import ast
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
CONJUNCTIONS = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
COUNTERPARTS = {"min": "max", "max": "min", "any": "all", "all": "any", "zeros": "ones", "ones": "zeros"}
Change = tuple[int, int, str]
"""First character and end of what is replaced, and the text in its place."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        file: below the root of the repository.
        start, end, new: the characters that are replaced, and by what.
        name: file, function, the text before and after, and which of those alike; it says nothing of lines, so that it
            is the same in another version of the file in which the function is the same.
    """

    file: str
    start: int
    end: int
    new: str
    name: str

    def rank(self, seed: int) -> str:
        """Random, but of the mutant alone: the sample of another version differs only by the mutants that differ."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).hexdigest()


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All of a file, in the order of its text."""
    changes = sorted(set(_Changes(source)), key=lambda found: found[1])
    found: list[Mutant] = []
    alike: Counter[str] = Counter()
    for where, (start, end, new) in changes:
        name = f"{file} {where}: {_short(source[start:end])} -> {_short(new)}"
        alike[name] += 1
        found.append(Mutant(file, start, end, new, f"{name} #{alike[name]}"))
    return found


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:40]}...{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class _Changes:
    """The changes of a source, each with the function that it is in."""

    def __init__(self, source: str):
        self.source = source
        self.tree = ast.parse(source)
        lines = source.splitlines(keepends=True)
        self.lines = [line.encode() for line in lines]
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))

    def __iter__(self) -> Iterator[tuple[str, Change]]:
        yield from self.walk(self.tree, "module")

    def walk(self, node: ast.AST, where: str) -> Iterator[tuple[str, Change]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = node.name if where == "module" else f"{where}.{node.name}"
        for change in self.of(node):
            yield where, change
        if isinstance(node, ast.Raise):  # its message stays as it is
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not self.stays(child):
                    yield from self.walk(child, where)

    @staticmethod
    def stays(node: ast.AST) -> bool:
        """Text for people, assertions and imports."""
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_text or isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom)

    def place(self, line: int, column: int) -> int:
        """The character of what `ast` gives as a line and a column in bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1][:column].decode())

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.place(node.end_lineno, node.end_col_offset)

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        """An operator, which has no place of its own in the tree."""
        gap = self.source[self.end(left) : self.start(right)]
        pattern = re.escape(old).replace(r"\ ", r"\s+")
        found = re.search(rf"(?<![\w*/<>=!]){pattern}(?![\w*/=])", gap)
        if found and "#" not in gap:
            yield self.end(left) + found.start(), self.end(left) + found.end(), new

    def of(self, node: ast.AST) -> Iterator[Change]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=rights):
                for one, operator, other in zip([left, *rights], ops, rights):
                    yield from self.between(one, other, *COMPARISONS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
                yield from self.between(left, right, *ARITHMETIC[type(operator)])
            case ast.BoolOp(op=operator, values=values):
                for one, other in itertools.pairwise(values):
                    yield from self.between(one, other, *CONJUNCTIONS[type(operator)])
            case ast.UnaryOp(op=ast.Not() | ast.USub() as operator):
                yield self.start(node), self.start(node) + (3 if isinstance(operator, ast.Not) else 1), ""
            case ast.Constant(value=bool(value)):
                yield self.start(node), self.end(node), str(not value)
            case ast.Constant(value=int(value) | float(value)):
                yield self.start(node), self.end(node), str(value + 1 if isinstance(value, int) else 2 * value + 1e-3)
            case ast.Call():
                yield from self.of_call(node)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                if isinstance(test, ast.Name | ast.Attribute | ast.Call):
                    yield self.start(test), self.end(test), f"(not {self.source[self.start(test) : self.end(test)]})"
            case ast.Raise() | ast.AugAssign() | ast.Delete() | ast.Expr(value=ast.Call() | ast.Await()):
                yield self.start(node), self.end(node), "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self.start(node), self.end(node), "pass"

    def of_call(self, call: ast.Call) -> Iterator[Change]:
        """An option forgotten, the first arguments exchanged, the opposite function."""
        for keyword in call.keywords:
            if keyword.arg is not None:
                comma = re.match(r"\s*,", self.source[self.end(keyword) :])
                yield self.start(keyword), self.end(keyword) + (comma.end() if comma else 0), ""
        if len(call.args) > 1 and not any(isinstance(value, ast.Starred) for value in call.args[:2]):
            (first, second), text = call.args[:2], self.source
            one, other = (text[self.start(value) : self.end(value)] for value in (first, second))
            if one != other:
                yield self.start(first), self.end(second), other + text[self.end(first) : self.start(second)] + one
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if name in COUNTERPARTS:
            yield self.end(call.func) - len(name), self.end(call.func), COUNTERPARTS[name]
