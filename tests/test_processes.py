"""A forked command is what the command is by itself: `tests/processes.py`."""

import os
import subprocess
import sys

import pytest

from tests import conftest, processes

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


@pytest.mark.parametrize(
    "code", ["", "raise SystemExit", "raise SystemExit(7)", "raise SystemExit('why')", "raise ValueError('why')",
             "import os; os.kill(os.getpid(), 11)", "import atexit; atexit.register(print, 'at the end')"]
)  # fmt: skip
def test_statuses_and_outputs(code):
    command = [sys.executable, "-c", f"import sys\nprint('out')\n{code}"]
    forked, started = processes.run(command), subprocess.run(command, capture_output=True, text=True)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


@pytest.mark.parametrize("with_transformers", [True, False])
def test_what_was_imported_before_is_others(with_transformers):
    names = ("torch", "transformers", "hf_hybrid_ssm", "pytest")
    code = f"import sys; print([name in sys.modules for name in {names}])"
    found = processes.run([sys.executable, "-c", code], with_transformers=with_transformers)
    assert found.stdout.strip() == str([True, with_transformers, False, False])


def test_the_environment_is_kept(monkeypatch):
    monkeypatch.setenv("CHANGED", "first")
    monkeypatch.setenv("REMOVED", "first")
    before = dict(os.environ)
    with pytest.raises(ValueError), conftest.kept_environment():
        os.environ |= {"CHANGED": "second", "ADDED": "second"}
        del os.environ["REMOVED"]
        raise ValueError
    assert os.environ == before


def test_what_a_test_sets_ends_with_it(request):
    """Even what a library sets that it imports; else nothing would be forked for the tests after it."""
    call = conftest.pytest_runtest_call(request.node)
    next(call)
    os.environ["HF_SET_BY_A_TEST"] = "1"
    with pytest.raises(StopIteration):
        next(call)
    assert "HF_SET_BY_A_TEST" not in os.environ


def test_an_environment_that_imports_read_starts_a_new_process():
    code = "import os, sys; print('torch' in sys.modules, os.environ['TRANSFORMERS_VERBOSITY'])"
    own = os.environ | processes.DEFAULTS | {"TRANSFORMERS_VERBOSITY": "error"}
    assert processes.run([sys.executable, "-c", code], env=own).stdout.split() == ["False", "error"]
    ranks = processes.run_ranks(["-c", f"{code}; print(os.environ['RANK'])"], env=own)
    assert [rank.stdout.split() for rank in ranks] == [["False", "error", "0"], ["False", "error", "1"]]


def test_ranks_and_the_first_error():
    code = "import os, time; print(os.environ['RANK']); {}"
    found = processes.run_ranks(["-c", code.format("pass")], env=os.environ)
    assert [(each.returncode, each.stdout) for each in found] == [(0, "0\n"), (0, "1\n")]
    fails = code.format("time.sleep(0 if os.environ['RANK'] == '1' else 600); raise SystemExit(3)")
    assert [each.returncode for each in processes.run_ranks(["-c", fails], env=os.environ)] == [-9, 3]
