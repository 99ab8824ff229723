"""Python processes for tests, forked from one that has imported torch and transformers: that import takes six seconds
of a processor, and a test that wants another process rarely wants another import.

`run` is called as `subprocess.run` is, with the Python of any environment. Each command has its own memory, working
folder, environment, `sys.path` and `__main__`, as if started by itself; only modules of other people's are in
`sys.modules` already, and this package is not. Where it matters what imports transformers, `with_transformers=False`
forks from a process that has the rest. What an environment sets while these are imported cannot be forked: then `run`
starts a new process, as tests of the start itself do by `subprocess`.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

OTHERS = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "accelerate",
    "datasets",
    "safetensors.torch",
    "sklearn.metrics",
)
TRANSFORMERS = (
    "transformers",
    "transformers.generation.utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.trainer",
    "transformers.trainer_seq2seq",
)
# variables that begin so are read when Python starts or those are imported: where they differ, nothing is forked
READ_ON_IMPORT = (
    "ATEN_", "HF_", "HOME", "LANG", "LC_", "LD_", "MKL_", "OMP_", "PYTHON", "TMPDIR", "TORCH", "TRANSFORMERS_",
    "TRITON_", "XDG_",
)  # fmt: skip
FOLLOWED = (
    "PYTHONPATH",
    "HF_MODULES_CACHE",
    "HF_HYBRID_SSM_",
    "HF_XET_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)
DEFAULTS = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
AT_FIRST = dict(os.environ)  # before a test changes it for itself


def run(
    command: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    timeout: float | None = None,
    check: bool = False,
    with_transformers: bool = True,
) -> subprocess.CompletedProcess:
    """The command of a Python program, without options of Python's own: [python, "-c" | "-m" | file, ...]."""
    environment = DEFAULTS | dict(os.environ if env is None else env)
    done = _run_all([list(map(str, command))], [environment], cwd, timeout, with_transformers)[0]
    if check:
        done.check_returncode()
    return done


def free_port() -> int:
    """One that nothing listens on, and that no system gives to whoever asks for any before the server has started."""
    draw = random.SystemRandom()  # processes of tests that share seeds run side by side
    while True:
        port = draw.randint(10_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def run_ranks(
    arguments: Sequence[object],
    *,
    env: Mapping[str, str],
    ranks: int = 2,
    cwd: str | os.PathLike | None = None,
    timeout: float | None = 600,
) -> list[subprocess.CompletedProcess]:
    """Processes that find each other, with the environment that `torchrun` gives them; the first error ends all."""
    port = str(free_port())
    shared = DEFAULTS | dict(env) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return _run_all([[sys.executable, *map(str, arguments)]] * ranks, environments, cwd, timeout)


def _run_all(commands, environments, cwd, timeout, with_transformers=True) -> list[subprocess.CompletedProcess]:
    pythons = {command[0] for command in commands}
    can_fork = hasattr(os, "fork") and len(pythons) == 1
    if can_fork and not any(_differs(environment) for environment in environments):
        return _server(*pythons).run(commands, environments, Path(cwd or Path.cwd()), timeout, with_transformers)
    with contextlib.ExitStack() as files:
        outputs = [[files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in commands]
        started = [
            subprocess.Popen(command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            for command, environment, (out, err) in zip(commands, environments, outputs, strict=True)
        ]
        try:
            _wait(started, timeout)
        finally:
            for process in started:
                process.kill()
                process.wait()
        texts = [[(file.seek(0), file.read())[1] for file in pair] for pair in outputs]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *text)
        for process, text in zip(started, texts, strict=True)
    ]


def _wait(started: Sequence[subprocess.Popen], timeout: float | None) -> None:
    """Until all have ended, or one with an error."""
    ends = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in started]
        if any(codes) or None not in codes:
            return
        if ends is not None and time.monotonic() > ends:
            raise subprocess.TimeoutExpired(started[0].args, timeout)
        time.sleep(0.02)


def _differs(environment: Mapping[str, str]) -> bool:
    theirs = _server_environment()
    names = [name for name in {*environment, *theirs} if name.startswith(READ_ON_IMPORT)]
    return any(environment.get(name) != theirs.get(name) for name in names if not name.startswith(FOLLOWED))


def _server_environment() -> dict[str, str]:
    return DEFAULTS | {name: value for name, value in AT_FIRST.items() if not name.startswith(FOLLOWED)}


@cache
def _server(python: str) -> "_Server":
    return _Server(python)


class _Server:
    """The processes that fork, without transformers and with it; they end when this one does."""

    def __init__(self, python: str) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [pair[1].fileno() for pair in pairs]
        command = [python, "-P", __file__, *map(str, theirs)]
        options = {"pass_fds": theirs, "process_group": 0, "stdin": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=_server_environment(), **options)
        for pair in pairs:
            pair[1].close()
        self._connections = [(ours, ours.makefile("rw", encoding="utf-8")) for ours, _ in pairs]
        atexit.register(self.close)

    def close(self, patience: float = 5) -> None:
        """End them and what they run. Those that end by themselves are waited for, so that their time counts as that
        of this process's children."""
        for connection, lines in self._connections:
            lines.close()
            connection.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def run(self, commands, environments, cwd, timeout, with_transformers) -> list[subprocess.CompletedProcess]:
        connection, lines = self._connections[with_transformers]
        with tempfile.TemporaryDirectory() as folder:
            outputs = [[str(Path(folder, f"{kind}{rank}")) for kind in "oe"] for rank in range(len(commands))]
            requests = [
                {"arguments": command[1:], "environment": environment, "cwd": str(cwd), "outputs": files}
                for command, environment, files in zip(commands, environments, outputs, strict=True)
            ]
            connection.settimeout(timeout)
            try:
                print(json.dumps(requests), file=lines, flush=True)
                statuses = json.loads(lines.readline())
            except TimeoutError:
                _server.cache_clear()
                self.close(patience=0)
                raise subprocess.TimeoutExpired(commands[0], timeout) from None
            texts = [[Path(file).read_text(encoding="utf-8", errors="replace") for file in files] for files in outputs]
        return [
            subprocess.CompletedProcess(command, status, *text)
            for command, status, text in zip(commands, statuses, texts, strict=True)
        ]


# -- the process that forks -------------------------------------------------------------------------------------------


def serve(without: socket.socket, with_: socket.socket) -> None:
    """Fork for what is asked on each connection, until both are closed; a second process imports transformers."""
    _import(OTHERS)
    if second := os.fork():
        with_.close()
        answer(without)
        with contextlib.suppress(ChildProcessError):  # waited for among the commands
            os.waitpid(second, 0)
    else:
        without.close()
        _import(TRANSFORMERS)
        answer(with_)


def _import(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
            importlib.import_module(name)
    assert threading.active_count() == 1  # a fork takes one thread along, and the locks of all
    gc.freeze()  # or each fork's garbage collector would look through all of it, and so copy it


def answer(own: socket.socket) -> None:
    """Fork for each request, and answer with the statuses as `subprocess` has them; until the connection is closed."""
    with own, own.makefile("rw", encoding="utf-8") as lines:
        own.set_inheritable(False)
        for line in lines:
            requests = json.loads(line)
            running = {}
            for rank, request in enumerate(requests):
                child = os.fork()
                if child == 0:
                    own.close()
                    _become(**request)
                running[child] = rank
            statuses = [0] * len(requests)
            while running:
                child, found = os.wait()
                if child not in running:
                    continue
                statuses[running.pop(child)] = status = os.waitstatus_to_exitcode(found)
                if status:
                    for other in running:
                        os.kill(other, signal.SIGKILL)
            print(json.dumps(statuses), file=lines, flush=True)


def _become(arguments: list[str], environment: dict[str, str], cwd: str, outputs: list[str]) -> None:
    """This process is now `python *arguments`; never returns."""
    status = 1
    try:
        for number, file in enumerate((os.devnull, *outputs)):
            opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(opened, number)
            os.close(opened)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        _follow(environment)
        _execute(arguments)
        status = 0
    except SystemExit as exit_:
        status = _status(exit_.code)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _status(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 255
    print(code, file=sys.stderr)
    return 1


def _follow(environment: dict[str, str]) -> None:
    """What these variables would have set when Python started and modules were imported."""
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if folder := environment.get("HF_MODULES_CACHE"):
        for module in list(sys.modules.values()):
            if "HF_MODULES_CACHE" in getattr(module, "__dict__", ()):
                module.HF_MODULES_CACHE = folder


def _execute(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "-c":
        sys.argv, sys.modules["__main__"] = ["-c", *rest[1:]], types.ModuleType("__main__")
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
