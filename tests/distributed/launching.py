"""Two processes on this machine, with what `torchrun` tells them."""

import os
import sys
from pathlib import Path

from tests import processes


def in_two_processes(script: Path, *arguments: object) -> None:
    """Run a script with gloo between the processes; its errors are shown."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    for run in processes.run_ranks([script, *arguments], env=environment):
        first = run.stderr.find("Traceback")
        assert run.returncode == 0, run.stderr[max(first, 0) :][:5000]
