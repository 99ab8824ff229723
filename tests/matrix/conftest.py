"""What other libraries cannot do is an expected failure, recognised by its text; any other failure is ours."""

import re
from importlib.metadata import version

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "limit(library, error, reason): what the library cannot do, by a regular expression of its error"
    )


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    outcome = yield
    report = outcome.get_result()
    if report.when != "call" or not report.failed:
        return
    error = call.excinfo.value
    while error.__cause__ is not None:  # what began it all
        error = error.__cause__
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    for library, pattern, reason in (mark.args for mark in item.iter_markers("limit")):
        if re.search(pattern, line):
            report.outcome, report.wasxfail = "skipped", f"{library} {version(library)}: {reason} (`{line[:200]}`)"


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    """They count against a limit of the compiler."""
    torch._dynamo.reset()
