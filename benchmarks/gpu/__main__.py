"""What a card can tell, in commands that end by themselves and go on where the last one stopped.

    bash tools/card.sh                             # on a card: all that is left, in at most 530 seconds
    bash tools/card.sh --seconds 3600              # on a card of one's own
    bash tools/card.sh --cases '^scan: .*forward$' # only what has such a name, its part's before it
    bash tools/card.sh --device cpu --rehearse     # every code path with tiny sizes, without a card

`benchmarks.gpu.plan` has the parts, in the order of what decides most. A case that fails, takes more than a minute or
ends its process is recorded as failed, and the others run. Results are in runs/card/gpu.json, where a second command
on the same machine finds them, and after every case in build/card (or in OUT) too, with the page, gpu.md, at the end.
What is in build/card/gpu.json counts, as that of a machine that was given back. A rehearsal has folders of its own,
runs/card_rehearsal and build/card_rehearsal. A change of the sources has the parts run again that are about them.

Status 0: every case that was asked for has run and is right; 1: one is not; 2: this cannot run; 3: some have not run.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.plan import DONE, FATAL, LONGEST_CASE, OUT_OF_TIME, ROOT, SECONDS
from benchmarks.gpu.requirements import missing_peers, problems

if TYPE_CHECKING:
    from benchmarks.gpu.settings import Settings
    from benchmarks.gpu.store import Store

BEGIN = time.time()
AT_THE_END = 10  # seconds: the page, and a process that is ended


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash tools/card.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes; needed on a CPU")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"after which all has ended (default: {SECONDS})"
    )
    parser.add_argument("--cases", type=pattern, default=pattern(""), help="only cases in whose names this is found")
    parser.add_argument("--out", type=Path, help="folder of the results' copy")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and not arguments.rehearse:
        parser.error("--device cpu needs --rehearse: this measures cards")
    name = "card_rehearsal" if arguments.rehearse else "card"
    arguments.results, travelled = ROOT / "runs" / name, ROOT / "build" / name
    arguments.out, arguments.resume = (arguments.out or travelled).resolve(), travelled / "gpu.json"
    return arguments


def pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def main() -> int:
    arguments = arguments_of()
    if found := problems(arguments.device):
        print("\n".join(["This cannot run:", *found]), file=sys.stderr)
        return 2
    from benchmarks.gpu.settings import Settings
    from benchmarks.gpu.store import Store

    settings = Settings(arguments.device, arguments.rehearse)
    identity = {"device": device_name(settings.device), "rehearsal": settings.rehearse}
    store = Store(arguments.results, identity, arguments.out)
    if arguments.until:
        from benchmarks.gpu.child import run_cases

        return run_cases(settings, store, arguments.until, arguments.cases)
    if arguments.resume.is_file():
        print(f"{store.resume(arguments.resume)} cases come from {os.path.relpath(arguments.resume)}.", flush=True)
    if peers := missing_peers():
        print(f"Not compared with, since they are not installed: {', '.join(peers)}.", flush=True)
    code = run_to_the_end(arguments, store, BEGIN + arguments.seconds - AT_THE_END)
    return code if code not in (DONE, OUT_OF_TIME) else report(arguments, settings, store)


def report(arguments: argparse.Namespace, settings: "Settings", store: "Store") -> int:
    """Write the page, and say what there is; → the status."""
    from benchmarks.gpu.report import asked_of, made, overview, page

    store.write("gpu.md", page(store, settings))
    print(
        f"{made(store, settings)}\n\n{overview(store)}\nAll of it is in {os.path.relpath(arguments.out)}.", flush=True
    )
    try:
        failed, waiting = asked_of(store, arguments.cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if waiting:
        print(f"{len(waiting)} cases have not run: the same command goes on with them.", flush=True)
    return 1 if failed else OUT_OF_TIME if waiting else 0


def run_to_the_end(arguments: argparse.Namespace, store: "Store", until: float) -> int:
    """DONE or OUT_OF_TIME; another status is of a process that ended before its first case."""
    store.running.unlink(missing_ok=True)
    while True:
        code = watch(arguments, until, store.running)
        if time.time() > until:  # what ran then is not to blame
            store.running.unlink(missing_ok=True)
            return OUT_OF_TIME
        if killed := store.record_killed(f"its process ended with status {code}"):
            print(f"{killed}: its process ended with status {code}", flush=True)
        elif code in (DONE, OUT_OF_TIME):
            return code
        elif code != FATAL:
            print(f"the process that runs the cases ended with status {code} before the first", file=sys.stderr)
            return code


def watch(arguments: argparse.Namespace, until: float, mark: Path) -> int:
    """Run the cases in a process of their own, and end it if one of them takes too long, or at the end of the time."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", arguments.device, "--until", str(until)]
    command += ["--out", str(arguments.out), "--cases", arguments.cases.pattern]
    command += ["--rehearse"] if arguments.rehearse else []
    longest = LONGEST_CASE * (10 if arguments.rehearse else 1)  # a CPU may be busy with something else
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if arguments.device == "cpu" else {}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if age(mark) > longest or time.time() > until:
                break
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the tools and compilers that it started
    return process.wait()


def age(file: Path) -> float:
    """Seconds since a file was written, 0 where there is none; it may go at any time."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
