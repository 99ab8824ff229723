"""Every misuse in the catalogue is answered by an exception that says what was wrong."""

from pathlib import Path

import pytest

from tests.reliability.misuse import MISUSES, answer, fault
from tests.reliability.misuses import Misuse
from tests.reliability.misuses.silent import SILENT


@pytest.mark.parametrize("misuse", MISUSES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_misuse_is_answered(misuse, tmp_path):
    assert fault(misuse, answer(misuse, tmp_path)) is None


@pytest.mark.parametrize(("done", "provoke", "happens"), SILENT)
@pytest.mark.filterwarnings("ignore")
def test_what_is_told_to_be_silent_is(done, provoke, happens, tmp_path):
    provoke(tmp_path)


def test_no_misuse_is_counted_twice():
    assert len({str(misuse) for misuse in MISUSES}) == len(MISUSES) >= 100


def _raising(error: Exception | None) -> Misuse:
    def provoke(folder: Path) -> None:
        if error is not None:
            raise error

    return Misuse("any", "any", provoke, (ValueError,), "size=3 must be even")


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (None, "silently"),
        (KeyError("size=3 must be even"), "KeyError instead of ValueError"),
        (ValueError("bad value"), "the message lacks"),
    ],
)
def test_a_poor_answer_is_a_fault(error, found, tmp_path):
    misuse = _raising(error)
    assert found in fault(misuse, answer(misuse, tmp_path))
