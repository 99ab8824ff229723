"""Make a failing program small: drop instructions, rows and columns, take plainer forms, while it fails alike."""

import copy
from collections.abc import Iterator
from dataclasses import replace

from tests.programs.interpreter import Outcome, run
from tests.programs.program import Copy, Feed, Malformed, Program, Reorder, Repeat, Select, Switch

PLAINER = {"inputs": "ids", "mask": "none", "packing": "none", "positions": False, "filler": 0}


def shrink(program: Program, outcome: Outcome, attempts: int = 600) -> Program:
    """A smaller program whose failure is of the same kind; each candidate is run."""
    smaller = True
    while smaller and attempts > 0:
        smaller = False
        for candidate in _candidates(program):
            attempts -= 1
            if attempts <= 0:
                break
            if _fails(candidate, outcome.kind):
                program, smaller = candidate, True
                break
    return program


def _fails(program: Program, kind: str | None) -> bool:
    try:
        return run(program).kind == kind
    except Malformed:
        return False


def _candidates(program: Program) -> Iterator[Program]:
    """The boldest first."""
    count = len(program.steps)
    size = count // 2
    while size >= 1:
        for begin in range(0, count, size):
            yield replace(program, steps=program.steps[:begin] + program.steps[begin + size :])
        size //= 2
    for kept in _row_subsets(program):
        if (smaller := without_rows(program, kept)) is not None:
            yield smaller
    for index, step in enumerate(program.steps):
        if isinstance(step, Feed):
            for feed in _smaller_feeds(step):
                yield replace(program, steps=[*program.steps[:index], feed, *program.steps[index + 1 :]])
    for name, plain in (("record", False), ("dtype", "float64"), ("cache", "dynamic")):
        if getattr(program, name) != plain and not (program.cache == "none" and name == "cache"):
            yield replace(program, **{name: plain})


def _smaller_feeds(step: Feed) -> Iterator[Feed]:
    for size in (step.length // 2, 1):
        for begin in range(0, step.length, max(size, 1)):
            columns = [column for column in range(step.length) if not begin <= column < begin + size]
            if columns and size:
                rows = [[row[column] for column in columns] for row in step.rows]
                starts = [[columns.index(c) for c in row if c in columns] for row in step.starts]
                yield replace(step, rows=rows, starts=starts)
    for name, plain in PLAINER.items():
        if getattr(step, name) != plain:
            yield replace(step, **{name: plain})
    for index, starts in enumerate(step.starts):
        for start in starts:
            fewer = [s for s in starts if s != start]
            yield replace(step, starts=[*step.starts[:index], fewer, *step.starts[index + 1 :]])


def _row_subsets(program: Program) -> Iterator[list[int]]:
    first = next((step for step in program.steps if isinstance(step, Feed)), None)
    count = len(first.rows) if first is not None else 0
    if count > 1:
        for index in range(count):
            yield [row for row in range(count) if row != index]


def without_rows(program: Program, kept: list[int]) -> Program | None:
    """The program with these rows of the first batch alone, and what becomes of them; None where none is left."""
    present, branches, steps = kept, [], []
    first = next(step for step in program.steps if isinstance(step, Feed))
    batch, batches = len(first.rows), []
    for step in program.steps:
        step = copy.deepcopy(step)
        if isinstance(step, Feed):
            step = replace(
                step, rows=[step.rows[row] for row in present], starts=[step.starts[row] for row in present]
            )
        elif isinstance(step, Reorder | Select):
            after = [place for place, row in enumerate(step.rows) if row in present]
            moved = [present.index(step.rows[place]) for place in after]
            if isinstance(step, Reorder) and len(moved) != len(present):
                step = Select(moved)
            else:
                step = type(step)(moved)
            batch, present = len(after) and batch, after
        elif isinstance(step, Repeat):
            present = [row * step.times + copy_ for row in present for copy_ in range(step.times)]
        elif isinstance(step, Copy):
            branches.append(present)
            batches.append(batch)
        elif isinstance(step, Switch):
            present, branches[step.branch] = branches[step.branch], present
        if not present:
            return None
        steps.append(step)
    sources = [program.sources[row] for row in kept] if program.sources else []
    return replace(program, sources=sources, steps=steps)
