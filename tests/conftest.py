"""What all tests share.

What a test, or a library that it imports, writes to the environment ends with it: a process that it starts is forked
only where the environment is that of the start (`tests.processes`), and lm-eval sets a variable of the Hub's when it
is imported.

What was collected lives as long as the process: the garbage collector passes it over, or a tenth of the time would go
into looking through it again and again. And no seed is kept for an accelerator that is not there: torch writes down
the whole stack with each, three times for one `torch.manual_seed`, which takes a millisecond below pytest.
"""

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator

import pytest

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # torch's compiler finds the C++ of another instruction set in its cache, and it does not compile (torch 2.13)
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{capability}")
    )


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
