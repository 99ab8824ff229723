"""Recipes as a user starts them: in processes of their own."""

import os
import sys
from pathlib import Path

from tests import processes

RECIPES = Path(__file__).parents[2] / "recipes"


def launched(command, ranks=1, environment=None, **options):
    """What the command prints, which has to succeed, and to find what lies next to the recipe by itself.

    With `ranks`, it runs as often, as under `torchrun`; the first one's print is returned.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry and Path(entry) != RECIPES)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})}
    runs = (
        [processes.run(command, env=environment, **options)]
        if ranks == 1
        else processes.run_ranks(command[1:], env=environment, ranks=ranks, **options)
    )
    for run in runs:
        assert run.returncode == 0, run.stderr[-3000:]
    return runs[0].stdout
