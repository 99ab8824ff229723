"""Tests that can never run here are left out when collected, and counted at the end of the run by their reasons.

So a skip that is left says something about this run. Left out is what a mark or a decorator skips before anything has
run (no GPU, no C compiler, no flash attention), and of transformers' own tests also what their first lines skip for a
class (`tests.upstream.guards`). Pages made from tests keep all: they name what was skipped.

And what a test, or a library that it imports, writes to the environment ends with it: a process that it starts is
forked only where the environment is that of the start (`tests.processes`), and lm-eval sets a variable of the Hub's
when it is imported.

What was collected lives as long as the process: the garbage collector passes it over, or a tenth of the time would go
into looking through it again and again. And no seed is kept for an accelerator that is not there: torch writes down
the whole stack with each, three times for one `torch.manual_seed`, which takes a millisecond below pytest.
"""

import contextlib
import gc
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.reporting import THOROUGH
from tests.upstream.guards import reason_of_guards

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # torch's compiler finds the C++ of another instruction set in its cache, and it does not compile (torch 2.13)
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{capability}")
    )
LEFT_OUT = pytest.StashKey[dict[str, str]]()
"""Test → why it can never run here."""


def reason_of_marks(item: pytest.Item) -> str | None:
    """Why a mark of pytest or a decorator of unittest skips this test wherever it runs here, or None."""
    for mark in item.iter_markers():
        if mark.name == "skip" or (mark.name == "skipif" and any(value is True for value in mark.args)):
            return str(mark.kwargs.get("reason") or mark.name)
    test_class = getattr(item, "cls", None)
    for holder in (getattr(test_class, item.name, None), test_class):
        if getattr(holder, "__unittest_skip__", False):
            return holder.__unittest_skip_why__
    return None


@contextlib.contextmanager
def kept_environment() -> Iterator[None]:
    """After it, `os.environ` is what it was."""
    before = dict(os.environ)
    try:
        yield
    finally:
        if os.environ != before:
            os.environ.update(before)
            for name in os.environ.keys() - before.keys():
                del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with kept_environment():
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if THOROUGH:
        return
    reasons = {item: reason_of_marks(item) or reason_of_guards(item) for item in items}
    out = [item for item in items if reasons[item] is not None]
    config.stash[LEFT_OUT].update({item.nodeid: reasons[item] for item in out})
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if reasons[item] is None]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        gc.enable()
        keep_no_seeds_for_absent_devices()


def keep_no_seeds_for_absent_devices() -> None:
    torch = sys.modules.get("torch")  # no test may have asked for it
    for device in (torch.cuda, torch.xpu, torch.mtia) if torch else ():
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of xdist tells the one that started it; all of them collect the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT].update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reasons = Counter(config.stash[LEFT_OUT].values())
    if reasons:
        terminalreporter.section(f"{reasons.total()} tests can never run here and were left out")
        for reason, count in sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0])):
            terminalreporter.line(f"{count:5} {reason}")
