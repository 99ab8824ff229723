"""Recipes as a user starts them: in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def launched(command, **options):
    """What the command prints, which has to succeed, and to find what lies next to the recipe by itself."""
    path = os.pathsep.join(entry for entry in sys.path if entry and Path(entry) != RECIPES)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False, **options
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
