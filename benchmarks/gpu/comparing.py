"""Candidates that take turns, where some may not run on this machine."""

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.settings import Settings
from benchmarks.timing import paired_seconds


def compare(candidates: dict[str, Callable[[], Any]], settings: Settings, rounds: int | None = None) -> dict[str, Any]:
    """Milliseconds of each that runs, and what the others raised; the first is ours, and must run."""
    errors: dict[str, str] = {}
    for name, run in candidates.items():
        try:
            run()
        except Exception as error:  # a peer of another version must not take the comparison down with it
            if is_fatal(error) or name == next(iter(candidates)):
                raise
            errors[name] = one_line(error)
    runnable = {name: run for name, run in candidates.items() if name not in errors}
    seconds = paired_seconds(
        runnable, rounds=rounds or settings.rounds, warm_up=settings.pick(2, 0), device=settings.device
    )
    milliseconds = {name: round(1000 * value, 4) for name, value in seconds.items()}
    ours, *others = milliseconds
    ratios = {name: round(milliseconds[name] / milliseconds[ours], 2) for name in others}
    found: dict[str, Any] = {"milliseconds": milliseconds, "time_over_ours": ratios}
    return found | ({"errors": errors} if errors else {})


def is_fatal(error: BaseException) -> bool:
    """Whether the process can no longer use its GPU."""
    text = str(error)
    return "CUDA error" in text and "out of memory" not in text


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
