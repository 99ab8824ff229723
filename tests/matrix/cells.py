"""Asks one cell in a process of its own, so that a crash or a hang in another library is only that cell's answer."""

import contextlib
import multiprocessing
import os
import time
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection

from tests.matrix.columns import Column


@dataclass(frozen=True)
class Answer:
    """What a cell says.

    Args:
        kind: "yes", "no" or "not installed".
        error: one line, of the latter two.
        seconds: how long it took.
    """

    kind: str
    error: str = ""
    seconds: float = 0.0


def missing(column: Column) -> list[str]:
    """The distributions that the column asks for and this environment lacks."""
    found = {name.lower().replace("_", "-") for name in _installed()}
    return [name for name in (column.library, *column.needs) if name.lower().replace("_", "-") not in found]


def _installed() -> set[str]:
    return {distribution.metadata["Name"] for distribution in metadata.distributions() if distribution.metadata}


def ask(column: Column, row: str, time_limit: float) -> Answer:
    """The answer of one cell; nothing that happens in it reaches the caller."""
    lacking = missing(column)
    if lacking:
        return Answer("not installed", f"{', '.join(lacking)} is not installed")
    # forked: torch and transformers are imported once, and no cell sees what another did to them
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(column, row, sender))
    start = time.monotonic()
    process.start()
    sender.close()
    error = f"TimeoutError: no answer within {time_limit:.0f} s"
    if receiver.poll(time_limit):
        try:
            error = receiver.recv()
        except EOFError:
            process.join()
            error = f"the process ended with exit code {process.exitcode}"
    process.kill()
    process.join()
    return Answer("no" if error else "yes", error, time.monotonic() - start)


def _answer(column: Column, row: str, sender: Connection) -> None:
    error = ""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                column.check(row)
            except BaseException as raised:
                error = one_line(raised)
    sender.send(error)


def one_line(error: BaseException) -> str:
    """Name and message of what began it all, white space and line ends folded."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
