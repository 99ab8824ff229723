"""A page tells every outcome of the run it is made from, and pages older than their sources are listed."""

import shlex
import sys
from pathlib import Path

import pytest

from tests import jobs, processes, reporting

TESTS = '''"""What is asked

More of it.
"""

import pytest


@pytest.mark.parametrize("row", ["one", "two", "three"])
@pytest.mark.limit("pytest", "it cannot", "a reason.")
def test_a_column(row):
    assert row != "two", "wrong | here"
    if row == "three":
        raise ValueError("it cannot")


@pytest.mark.parametrize("size", [3, 4])
def test_figures(size, record_property):
    """What is measured."""
    record_property("error", size / 2)


@pytest.mark.parametrize("size", range(20))
def test_ranges(size, record_property):
    record_property("error", size)


def test_without_figures():
    pass
'''
RUN = """
import sys, pytest
from tests import reporting

class Shown(reporting.Writer):
    def pytest_sessionfinish(self):
        print("\\n\\n".join(reporting.sections(reporting.results(self.reports))))

plugins = ["-p", "tests.reporting", "-p", "tests.matrix.conftest", "-p", "no:cacheprovider"]
pytest.main([sys.argv[1], "-q", *plugins], plugins=[Shown(reporting.PAGES["matrix"], "matrix")])
"""


def test_a_page_tells_every_outcome(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-c", RUN, str(tmp_path / "test_it.py")]
    page = processes.run(command, cwd=reporting.ROOT, check=True).stdout
    assert "## What is asked\n\nMore of it." in page
    assert "|  | works for | not for |\n| --- | --- | --- |\n| a column | 1 of 3 | two; three |" in page
    assert (
        "### figures\n\nWhat is measured.\n\n| size | error | outcome |\n| --- | --- | --- |\n| 3 | 1.5 | passed |"
        in page
    )
    assert (
        "20 of 20 cases passed.\n\n|  | smallest | largest | of |\n| --- | --- | --- | --- |\n| error | 0 | 19 | 19 |"
        in page
    )
    assert "\n\nwithout figures (1 of 1).\n\n" in page
    assert f"| a column | three | pytest {pytest.__version__}: a reason. (`ValueError: it cannot`) |" in page
    assert "test_a_column[two] | AssertionError: wrong \\| here" in page


def test_pages_older_than_their_sources_are_found(tmp_path):
    page, commits = tmp_path / "page.md", reporting.git("log", "--format=%h", "--", "src").split()
    if len(commits) < 2:
        pytest.skip("there is no history")
    for commit, about, answer in (
        (reporting.git("log", "-1", "--format=%h"), "src", None),
        (commits[1], "src", "its sources changed in"),
        ("0123456", "src", "is not in this repository"),
    ):
        page.write_text(f"# Page\n\nMade by `it` from commit `{commit}` with python. About: `{about}`.\n")
        told = reporting.outdated(page)
        assert told is None if answer is None else answer in told
    page.write_text("# Page\n")
    assert "does not say" in reporting.outdated(page)


@pytest.mark.parametrize("reason, status", [(None, 0), ("its sources changed", 1)])
def test_a_stale_page_fails_the_check(reason, status, tmp_path, monkeypatch, capsys):
    """The last line of `make docs`."""
    (tmp_path / "page.md").touch()
    monkeypatch.setattr(reporting, "ROOT", tmp_path)
    monkeypatch.setattr(reporting, "REPORTS", tmp_path)
    monkeypatch.setattr(reporting, "outdated", lambda page: reason)
    for arguments, expected in (([], 0), (["--check"], status)):
        monkeypatch.setattr("sys.argv", ["reporting", *arguments])
        assert reporting.main() == expected
    assert (reason or "up to date") in capsys.readouterr().out
    assert "--check" in (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")


def test_every_name_is_listed_and_a_command_of_it_is_there(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reporting", "--list"])
    assert reporting.main() == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == sorted({*reporting.PAGES, *reporting.JOBS, *reporting.GROUPS})
    assert {member for members in reporting.GROUPS.values() for member in members} <= set(listed)
    commands = [shlex.split(command) for job in jobs.JOBS.values() for command in job.commands]
    for first, second, *_ in ([*words, ""] for words in commands):
        file = second.replace(".", "/") + ".py" if first == "-m" else first
        assert second in ("pytest", "hatchling", "hf_hybrid_ssm") or (reporting.ROOT / file).is_file(), file


def test_a_job_stops_at_the_first_command_that_fails(monkeypatch):
    job = jobs.Job("it", ('-c "import sys; sys.exit(len(sys.argv))"', "-c pass"))
    monkeypatch.setitem(jobs.JOBS, "it", job)
    assert reporting.run("it", ["one", "two"]) == 3
    monkeypatch.setitem(jobs.JOBS, "it", jobs.Job("it", ("-c pass", '-c "import sys; sys.exit(len(sys.argv))"')))
    assert reporting.run("it", ["one", "two"]) == 1  # further arguments are the first command's


def test_a_name_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reporting", "numeric"])
    with pytest.raises(SystemExit):
        reporting.main()
    assert "there is no numeric: choose from bench" in capsys.readouterr().err
