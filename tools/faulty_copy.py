"""A copy of the repository in which one text of one file is replaced by another, and whether tests notice.

The tests of each fault run in a process of their own, forked from one that has imported torch and transformers and
nothing of this repository (so this needs Linux or macOS). The copy has no history: tests that ask git are skipped.
"""

import importlib
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

LEFT_BEHIND = (".git", ".venv*", ".cache", ".*_cache", "__pycache__", "build", "dist", "runs", "*.egg-info")
OWN = ("hf_hybrid_ssm", "tests", "tools", "_lib", "benchmarks", "recipes")
"""Modules of the repository: a test's process must find those of the copy."""
PRELOADED = ("safetensors.torch", "transformers.models.llama.modeling_llama", "transformers.trainer")
TESTS_FAILED, NONE_FOUND = 1, 5


class FaultyCopy:
    """A copy of `root` below `folder`, made once and used again.

    Args:
        limit_s: processor seconds, and five times as many by the clock, after which tests count as hanging.
    """

    def __init__(self, root: Path, folder: Path, limit_s: int = 600):
        self.root, self.limit_s = folder / "copy", limit_s
        self.log = folder / "tests.log"
        if not self.root.is_dir():
            shutil.copytree(root, self.root, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        self._passing: dict[tuple[str, ...], bool] = {}

    def notices(self, file: str, start: int, end: int, new: str, tests: Sequence[str]) -> bool:
        """Whether one of the tests fails, hangs or crashes when characters start to end of `file` are `new`.

        Raises:
            RuntimeError: the tests fail without the fault too, or there are none.
        """
        self._check_passing(tuple(tests))
        path = self.root / file
        text = path.read_text(encoding="utf-8")
        path.write_text(text[:start] + new + text[end:], encoding="utf-8")
        try:
            return self._run(tests) != 0
        finally:
            path.write_text(text, encoding="utf-8")

    def _check_passing(self, tests: tuple[str, ...]) -> None:
        if tests not in self._passing:
            status = self._run(tests) if tests else NONE_FOUND
            if status == NONE_FOUND:
                raise RuntimeError(f"no test is found in {', '.join(tests) or 'no file'}.")
            self._passing[tests] = status == 0
        if not self._passing[tests]:
            told = [
                line for line in self.log.read_text(encoding="utf-8").splitlines() if line.startswith(("FAILED", "E"))
            ]
            raise RuntimeError(f"{', '.join(tests)} fail without a fault: {' | '.join(told[-5:])}")

    def _run(self, tests: Sequence[str]) -> int:
        """pytest's exit status, negative for a signal."""
        preload()
        process = os.fork()
        if process == 0:
            self._become_tests(tests)
        until = time.monotonic() + 5 * self.limit_s
        while time.monotonic() < until:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.killpg(process, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def _become_tests(self, tests: Sequence[str]) -> None:
        status = TESTS_FAILED
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (self.limit_s, self.limit_s + 10))
            with self.log.open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            os.chdir(self.root)
            for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
                del sys.modules[name]
            paths = [str(self.root / part) for part in ("src", "recipes", "")]
            sys.path[:0] = paths
            sys.dont_write_bytecode = True  # a fault may leave a file's size and second of writing as they were
            own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
            os.environ.update(own)
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
        except BaseException:  # nothing of this process may go on
            traceback.print_exc()
        finally:
            print(flush=True)
            os._exit(status)


def preload() -> None:
    """What most tests import, once for all."""
    for name in PRELOADED:
        importlib.import_module(name)
