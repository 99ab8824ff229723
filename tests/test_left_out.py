"""Which tests are left out when collected, and that they are counted by their reason; no other test is."""

import os
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

from tests.upstream import guards

TESTS = """
import unittest
import pytest

def test_that_runs(): ...

@pytest.mark.skipif(1 + 1 == 2, reason="no card")
@pytest.mark.parametrize("case", [1, 2])
def test_for_a_card(case): ...

@pytest.mark.skipif(1 + 1 == 3, reason="no lamp")
def test_by_daylight(): ...

def test_that_finds_out():
    pytest.skip("only the test knows")

class Cases(unittest.TestCase):
    @unittest.skip("no card")
    def test_decorated(self): ...

    def test_plain(self): ...

@unittest.skipUnless(False, "no time")
class Slow(unittest.TestCase):
    def test_one(self): ...
"""


@pytest.mark.parametrize("processes", [[], ["-n", "1"]], ids=["here", "xdist"])
def test_what_marks_and_decorators_skip_is_left_out_and_counted(processes, tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *processes]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HYBRID_SSM_PAGE"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_ADDOPTS": ""}
    ran = subprocess.run([*command, tmp_path], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 tests can never run here and were left out" in ran.stdout
    assert "\n    3 no card\n    1 no time\n" in ran.stdout
    assert "3 passed, 1 skipped" in ran.stdout


class Case(unittest.TestCase):
    has_attentions = False
    models = (int,)
    model_tester = None

    def guarded(self):
        """Text."""
        if not self.has_attentions:
            self.skipTest(reason=f"{self.models[0].__name__} attends to nothing")
        raise AssertionError

    def leading_on(self):
        leading(self, "name")

    def asking_for_setup(self):
        if not self.made_by_set_up.works:
            self.skipTest("no")

    def asking_for_what_setup_replaces(self):
        if not getattr(self.model_tester, "is_training", False):
            self.skipTest("no")

    def found_out_later(self):
        found = self.has_attentions
        if not found:
            self.skipTest("later")

    def for_others(self):
        if self.has_attentions:
            self.skipTest("not these")


def leading(self, name):
    if name == "another":
        self.skipTest("of the arguments")


def leading_to_a_guard(self):
    guarded_function(self)


def guarded_function(self):
    if not self.has_attentions:
        self.skipTest("by the function")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Case.guarded, "int attends to nothing"),
        (leading_to_a_guard, "by the function"),
        (Case.leading_on, None),
        (Case.asking_for_setup, None),
        (Case.asking_for_what_setup_replaces, None),
        (Case.found_out_later, None),
        (Case.for_others, None),
    ],
)
def test_guards_are_read_where_the_class_decides(function, reason, monkeypatch):
    monkeypatch.setattr(guards, "UPSTREAM", __name__)
    assert guards.reason_of(function, Case) == reason


def test_only_tests_of_transformers_are_read():
    assert guards.reason_of(Case.guarded, Case) is None
