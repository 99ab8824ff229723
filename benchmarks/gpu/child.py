"""The process that runs the cases: it tells which there are, and then the figures or the error of each."""

import gc
import importlib
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.comparing import is_fatal, one_line
from benchmarks.gpu.plan import PARTS
from benchmarks.gpu.settings import Settings

Cases = dict[str, Callable[[], dict]]


def serve(connection: Connection, settings: Settings) -> None:
    """Send the device's name and the names of all cases, receive those that are to run, and send of each in its turn
    its figures and whether the GPU needs a new process."""
    os.setpgid(0, 0)  # with the tools and compilers that it starts
    if settings.device == "cpu" and settings.has_triton:
        importlib.import_module("benchmarks.interpreter")
    compilations: list[bool] = count_compilations() if settings.device == "cuda" else []
    cases = {f"{part}: {case}": run for part in PARTS for case, run in cases_of(part, settings).items()}
    connection.send((torch.cuda.get_device_name() if settings.device == "cuda" else "cpu", list(cases)))
    for name in connection.recv():
        if settings.device == "cuda":  # the models of the case before
            gc.collect()
            torch.cuda.empty_cache()
        begin, before = time.perf_counter(), compilations.count(False)
        figures, fatal = attempt(cases[name], settings, name.partition(":")[0])
        figures["wall_seconds"] = round(time.perf_counter() - begin, 2)
        if compiled := compilations.count(False) - before:
            figures["programs_compiled"] = compiled
        connection.send((figures, fatal))


def cases_of(part: str, settings: Settings) -> Cases:
    """Those of a part; where its file raises, one that does."""
    try:
        return dict(importlib.import_module(f"benchmarks.gpu.{part}").cases(settings))
    except Exception as error:  # the other parts run

        def fail(error: Exception = error) -> dict:
            raise error

        return {"its cases": fail}


def count_compilations() -> list[bool]:
    """Of each Triton program that this process launches first, whether it was compiled before; the list grows."""
    from triton import knobs

    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    return hits


def attempt(run: Callable[[], dict], settings: Settings, part: str) -> tuple[dict[str, Any], bool]:
    """The figures, or the error; and whether the GPU needs a new process."""
    try:
        with nullcontext() if PARTS[part].is_interpreted else settings.plain_torch():
            figures = run()
        if settings.device == "cuda":
            torch.cuda.synchronize()
        return dict(figures), False
    except Exception as error:  # whatever a case does, the others are measured
        return {"error": one_line(error)}, is_fatal(error)
