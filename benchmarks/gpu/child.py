"""The process that runs the cases: each is recorded as soon as it has ended, with its figures or its error."""

import gc
import importlib
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch

from benchmarks.gpu.comparing import is_fatal, one_line
from benchmarks.gpu.parts import DONE, FATAL, INTERPRETED, OUT_OF_TIME
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.store import Store
from benchmarks.timing.models import FAMILIES, PEERS


def run_cases(
    settings: Settings, store: Store, parts: Iterable[str], until: float, chosen: re.Pattern[str] = re.compile("")
) -> int:
    """DONE, OUT_OF_TIME (`until`, in seconds since the epoch, has come) or FATAL: the GPU needs a new process.

    Only cases run in whose names `chosen` is found.

    When the process that started this one has been killed, the next run does the rest: two must not measure at once.
    """
    if settings.device == "cpu" and settings.has_triton:
        importlib.import_module("benchmarks.interpreter")
    parent, subject = os.getppid(), ""
    for part in parts:
        known = store.cases(part)
        for case, run in importlib.import_module(f"benchmarks.gpu.{part}").cases(settings):
            if case in known or not chosen.search(case):
                continue
            if time.time() > until or os.getppid() != parent:
                return OUT_OF_TIME
            store.begin(part, case)
            previous, subject = subject, subject_of(case)
            if subject != previous:
                torch.compiler.reset()  # of a function, torch keeps few compiled forms; one family needs few
            if settings.device == "cuda":  # the models of the case before
                gc.collect()
                torch.cuda.empty_cache()
            begin = time.perf_counter()
            figures, fatal = attempt(run, settings, part)
            wall = round(time.perf_counter() - begin, 2)
            store.record(part, case, figures | {"wall_seconds": wall})
            print(f"{part}: {case}: {figures.get('error', 'ok')} ({wall:.1f} s)", flush=True)
            if fatal:
                return FATAL
    return DONE


def attempt(run: Callable[[], dict], settings: Settings, part: str) -> tuple[dict, bool]:
    """The figures, or the error; and whether this process can go on."""
    try:
        with settings.plain_torch() if part not in INTERPRETED else nullcontext():
            figures = run()
        if settings.device == "cuda":
            torch.cuda.synchronize()
        return figures, False
    except Exception as error:  # whatever a case does, the others are measured
        return {"error": one_line(error)}, is_fatal(error)


def subject_of(case: str) -> str:
    """The family, or the case itself where it is not about one."""
    return next((name for name in (*FAMILIES, *PEERS) if case.startswith(name)), case)
