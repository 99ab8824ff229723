"""What is run seldom, by name."""

import shlex

import pytest

from tests import reporting


def test_every_job_names_a_command_that_is_there(capsys):
    assert reporting.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == sorted(reporting.JOBS)
    for job in reporting.JOBS.values():
        for first, second, *_ in ([*shlex.split(command), ""] for command in job.commands):
            file = second.replace(".", "/") + ".py" if first == "-m" else first
            assert second in ("pytest", "pip", "hatchling") or (reporting.ROOT / file).is_file(), file


@pytest.mark.parametrize("commands, status", [(("-c pass", "-c 'raise SystemExit(3)'"), 3), (("-c pass",), 0)])
def test_a_job_ends_with_the_status_of_what_failed(commands, status, monkeypatch):
    monkeypatch.setitem(reporting.JOBS, "it", reporting.Job("it", commands))
    assert reporting.main(["it"]) == status


def test_a_name_that_is_not_there_is_refused(capsys):
    assert reporting.main(["numeric"]) == 2
    assert "there is no numeric: choose from bench" in capsys.readouterr().err
