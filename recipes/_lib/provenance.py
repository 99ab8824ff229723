"""What a result depends on: the command, the machine, the versions and the commit of the sources."""

import json
import os
import platform
import shlex
import subprocess  # noqa: TID251 - asks git for the commit
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_hybrid_ssm.ops.core import instruction_sets

ROOT = Path(__file__).parents[2]
DATA_FOLDERS = ("HF_HYBRID_SSM_DATA", "HF_HYBRID_SSM_LRA")


def to_json(content: Any) -> str:
    """Where the data folders lie is this machine's affair: in the text they keep their variables' names."""
    text = json.dumps(content, indent=1) + "\n"  # there are many, and they travel with the code
    for name in DATA_FOLDERS:
        if folder := os.environ.get(name):
            text = text.replace(json.dumps(folder)[1:-1], f"${name}")
    return text


def _commit() -> str:
    """Of the sources, with "+" where they differ from it; "unknown" outside a repository."""
    if not (ROOT / ".git").exists():  # installed, perhaps inside another project's repository
        return "unknown"
    git = ["git", "-C", str(ROOT)]
    sources = [":/src", ":/recipes", ":/benchmarks/*.py"]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)  # noqa: S603
        changed = subprocess.run([*git, "status", "--porcelain", *sources], capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")


COMMIT = _commit()  # now, since the sources may have changed when the figures are written hours later


def machine() -> dict[str, Any]:
    """What a measured figure depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    found = {"processor": names[0] if names else platform.processor(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found | {
        "instruction_set": instruction_sets.in_use(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def provenance() -> dict[str, Any]:
    """What every committed file of figures begins with."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    command = f"python {shlex.join([name, *sys.argv[1:]])}"
    return {"command": command, "machine": machine(), "commit": COMMIT}
