"""Two processes on this machine, as `torchrun` starts them."""

import os
import subprocess
import sys
from pathlib import Path

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def in_two_processes(folder: Path) -> None:
    """Run `worker.py` with gloo between the processes; its errors are shown."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [*LAUNCHER, str(Path(__file__).with_name("worker.py")), str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    first = run.stderr.find("Traceback")  # the launcher's own report follows it
    assert run.returncode == 0, run.stderr[max(first, 0) :][:5000]
