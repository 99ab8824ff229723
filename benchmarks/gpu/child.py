"""The process that runs the cases: each is recorded as soon as it has ended, with its figures or its error."""

import gc
import importlib
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from benchmarks.gpu.comparing import is_fatal, one_line
from benchmarks.gpu.plan import DONE, FATAL, OUT_OF_TIME, PARTS
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.store import Store

Cases = dict[str, Callable[[], dict]]


def run_cases(settings: Settings, store: Store, until: float, chosen: re.Pattern[str] = re.compile("")) -> int:
    """DONE, OUT_OF_TIME (`until`, in seconds since the epoch, has come) or FATAL: the GPU needs a new process.

    Only cases run in whose names, after their part's, `chosen` is found.

    When the process that started this one has been killed, the next run does the rest: two must not measure at once.
    """
    if settings.device == "cpu" and settings.has_triton:
        importlib.import_module("benchmarks.interpreter")
    compilations: list[bool] = count_compilations() if settings.device == "cuda" else []
    parent = os.getppid()
    cases = {part: cases_of(part, settings, store) for part in PARTS}
    store.name({part: list(found) for part, found in cases.items()})
    for part in PARTS:
        known = store.cases(part)
        for case, run in cases[part].items():
            if case in known or not chosen.search(f"{part}: {case}"):
                continue
            if time.time() > until or os.getppid() != parent:
                return OUT_OF_TIME
            store.begin(part, case)
            if settings.device == "cuda":  # the models of the case before
                gc.collect()
                torch.cuda.empty_cache()
            begin, before = time.perf_counter(), compilations.count(False)
            figures, fatal = attempt(run, settings, part)
            figures["wall_seconds"] = round(time.perf_counter() - begin, 2)
            if compiled := compilations.count(False) - before:
                figures["programs_compiled"] = compiled
            store.record(part, case, figures)
            print(f"{part}: {case}: {figures.get('error', 'ok')} ({figures['wall_seconds']:.1f} s)", flush=True)
            if fatal:
                return FATAL
    return DONE


def cases_of(part: str, settings: Settings, store: Store) -> Cases:
    """Those of a part; none where its file raises, which is recorded in their place."""
    try:
        return dict(importlib.import_module(f"benchmarks.gpu.{part}").cases(settings))
    except Exception as error:  # the other parts run
        store.record(part, "its cases", {"error": one_line(error), "wall_seconds": 0.0})
        return {}


def count_compilations() -> list[bool]:
    """Of each Triton program that this process launches first, whether it was compiled before; the list grows."""
    from triton import knobs

    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    return hits


def attempt(run: Callable[[], dict], settings: Settings, part: str) -> tuple[dict, bool]:
    """The figures, or the error; and whether this process can go on."""
    try:
        with nullcontext() if PARTS[part].is_interpreted else settings.plain_torch():
            figures = run()
        if settings.device == "cuda":
            torch.cuda.synchronize()
        return figures, False
    except Exception as error:  # whatever a case does, the others are measured
        return {"error": one_line(error)}, is_fatal(error)
