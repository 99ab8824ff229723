"""Compiling and exporting first

A program may begin with either, before anything has filled a cache.
"""

import sys

from tests import processes
from tests.matrix.checks import EVERY_FAMILY
from tests.reporting import ROOT
from tests.tiny_models import compiles


@compiles
def test_nothing_has_to_run_before():
    command = [sys.executable, "-m", "tests.matrix.fresh_process"]
    result = processes.run(command, cwd=ROOT)
    done = [line for line in result.stdout.splitlines() if line.startswith(("exported", "compiled"))]
    assert done == [f"{what} {row}" for row in EVERY_FAMILY for what in ("exported", "compiled")], result.stderr[
        -3000:
    ]
