"""What is run seldom, by name."""

import shlex

from tests import reporting


def test_every_job_names_a_command_that_is_there(capsys):
    assert reporting.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == sorted(reporting.JOBS)
    for job in reporting.JOBS.values():
        for first, second, *_ in ([*shlex.split(command), ""] for command in job.commands):
            file = second.replace(".", "/") + ".py" if first == "-m" else first
            assert second in ("pytest", "pip", "hatchling") or (reporting.ROOT / file).is_file(), file
