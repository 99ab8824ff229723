"""A forked command is what the command is by itself: `tests/processes.py`."""

import os
import subprocess
import sys

import pytest

from tests import processes

TELL = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "name": __name__, "input": sys.stdin.read(),
    "main": sys.modules["__main__"].__dict__ is globals(), "environment": sorted(os.environ.items()),
    "ours": [name for name in sys.modules if name.startswith("hf_hybrid_ssm")],
}))
"""


@pytest.fixture(params=["-c", "-m", "file"])
def command(request, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/tell.py").write_text(TELL, encoding="utf-8")
    target = {"-c": ["-c", TELL], "-m": ["-m", "tell"], "file": [tmp_path / "there/tell.py"]}[request.param]
    return [sys.executable, *map(str, target), "one", "--two"]


def test_a_forked_command_is_told_what_a_started_one_is(command, tmp_path):
    for path in ({}, {"PYTHONPATH": f"{tmp_path}{os.pathsep}/elsewhere"}):
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | processes.DEFAULTS | path
        forked = processes.run(command, env=own, cwd=tmp_path / "there")
        started = subprocess.run(
            command, env=own, cwd=tmp_path / "there", capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert forked.stdout == started.stdout and forked.returncode == 0, forked.stderr


def test_ranks_and_the_first_error():
    code = "import os, time; print(os.environ['RANK']); {}"
    found = processes.run_ranks(["-c", code.format("pass")], env=os.environ)
    assert [(each.returncode, each.stdout) for each in found] == [(0, "0\n"), (0, "1\n")]
    fails = code.format("time.sleep(0 if os.environ['RANK'] == '1' else 600); raise SystemExit(3)")
    assert [each.returncode for each in processes.run_ranks(["-c", fails], env=os.environ)] == [-9, 3]
