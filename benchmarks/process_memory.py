"""Memory of this process as Linux counts it, in bytes. It needs no torch: another program's Python imports it too."""

from pathlib import Path

STATUS, MARKS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """What lies in memory now, files mapped into it included."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that has been resident since the start, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    MARKS.write_text("5", encoding="utf-8")


def _status(name: str) -> int:
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
