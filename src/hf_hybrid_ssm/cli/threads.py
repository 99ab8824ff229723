"""How many threads torch computes with, and what they do while they wait; decided before torch is imported.

OpenMP's threads wait by spinning. Where other processes want the same processors, or a container may use a part of
them, threads then burn the time that those they wait for need: on two cores under a load of 14, training fell to a
hundredth of its speed, where its share was an eighth. Waiting passively costs little where nobody else runs.
"""

import math
import os
from pathlib import Path

POLICY, THREADS = "OMP_WAIT_POLICY", "OMP_NUM_THREADS"
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def share_processors() -> None:
    """Threads wait without spinning, and there are as many as the container may use; what the user has set stays."""
    os.environ.setdefault(POLICY, "passive")
    quota = processor_quota()
    if quota is not None and quota < processors():
        os.environ.setdefault(THREADS, str(math.ceil(quota)))


def processors() -> int:
    """The processors that this process may run on, as torch counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """The processors that the control groups of this process leave it, such as 1.5; None where they set no limit."""
    limits = [limit for folder in _folders(root, own) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _folders(root: Path, own: Path) -> list[Path]:
    """The folders of this process's groups from its own up to the root, of version 2 and of version 1."""
    folders = [root, root / "cpu", root / "cpu,cpuacct"]
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        top = root / controllers if controllers else root
        folders += [top.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    return folders


def _limit(folder: Path) -> float | None:
    """Quota over period, in processors; None where there is none."""
    try:
        if (file := folder / "cpu.max").is_file():
            quota, period = file.read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
        return float(quota) / float(period) if quota.strip() not in ("max", "-1") else None
    except (OSError, ValueError):
        return None
