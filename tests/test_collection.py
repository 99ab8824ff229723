"""What pytest is told of this suite."""

import subprocess
import sys

from tests import processes
from tests.reporting import ROOT
from tools import smoke


def test_a_test_without_cases_is_an_error(tmp_path):
    """So `make test` ends where a list of parameters turns out empty."""
    file = tmp_path / "test_nothing.py"
    file.write_text("import pytest\n\n\n@pytest.mark.parametrize('row', [])\ndef test_rows(row): ...\n")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-c", str(ROOT / "pyproject.toml"), str(file)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stdout
    assert "Empty parameter set in 'test_rows'" in result.stdout


def test_every_test_that_the_smoke_test_names_is_there():
    """Pytest ends with 4 at a name that is not, which `.ci/run` would be the first to meet."""
    named = [*smoke.TESTS, *smoke.PASTED]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *named]
    result = processes.run(command, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
