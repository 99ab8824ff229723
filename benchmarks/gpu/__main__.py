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
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.plan import LONGEST_CASE, ROOT, SECONDS
from benchmarks.gpu.requirements import missing_peers, problems

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from benchmarks.gpu.results import Results

BEGIN = time.time()
AT_THE_END = 10  # seconds: the page, and a process that is ended
PROCESSES = multiprocessing.get_context("spawn")


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
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and not arguments.rehearse:
        parser.error("--device cpu needs --rehearse: this measures cards")
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
    from benchmarks.gpu.results import Results
    from benchmarks.gpu.settings import Settings

    os.environ |= {"HF_HUB_OFFLINE": "1"} | ({"TRITON_INTERPRET": "1"} if arguments.device == "cpu" else {})
    if peers := missing_peers():
        print(f"Not compared with, since they are not installed: {', '.join(peers)}.", flush=True)
    here, travelled = (ROOT / top / ("card_rehearsal" if arguments.rehearse else "card") for top in ("runs", "build"))
    out = (arguments.out or travelled).resolve()
    results = Results(Settings(arguments.device, arguments.rehearse), [here, out], [travelled, here])
    try:
        run_all(results, arguments.cases, BEGIN + arguments.seconds - AT_THE_END)
    except EOFError:
        print("the process that runs the cases ended before the first", file=sys.stderr)
        return 2
    results.write("gpu.md", results.page())
    print(f"{results.made()}\n\n{results.overview()}\nAll of it is in {os.path.relpath(out)}.", flush=True)
    chosen = [name for name in results.names if arguments.cases.search(name)]
    if results.names and not chosen:
        print(f"--cases {arguments.cases.pattern!r} is found in no case", file=sys.stderr)
        return 2
    waiting = [name for name in chosen if name not in results.cases]
    if waiting:
        print(f"{len(waiting)} cases have not run: the same command goes on with them.", flush=True)
    has_failed = any("error" in results.cases[name] for name in chosen if name in results.cases)
    return 1 if has_failed else 3 if waiting or not chosen else 0


def run_all(results: "Results", chosen: re.Pattern[str], until: float) -> None:
    """Run every chosen case that is not on record, in a process of its own that is started again after a case that
    ended it, took too long or left the GPU unusable; until all have run, or the time has come.

    Raises:
        EOFError: the process ended before its first case.
    """
    from benchmarks.gpu.child import serve

    while time.time() < until:
        ours, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=serve, args=(theirs, results.settings))
        process.start()
        theirs.close()
        try:
            if not ours.poll(max(0.0, until - time.time())):
                return
            results.begin(*ours.recv())
            waiting = [name for name in results.names if chosen.search(name) and name not in results.cases]
            ours.send(waiting)
            if run_some(results, waiting, ours, process, until):
                return
        finally:
            end(process)


def run_some(
    results: "Results",
    waiting: list[str],
    connection: "Connection",
    process: multiprocessing.process.BaseProcess,
    until: float,
) -> bool:
    """Record what a process tells of these cases; whether no other process is needed."""
    longest = LONGEST_CASE * (10 if results.settings.rehearse else 1)  # a CPU may be busy with something else
    for name in waiting:
        begin, needs_another = time.time(), True
        try:
            if connection.poll(min(longest, max(0.0, until - begin))):
                figures, needs_another = connection.recv()
            elif time.time() >= until:  # what ran then is not to blame
                return True
            else:
                figures = {"error": f"took more than {longest} seconds", "killed": True}
        except EOFError:
            process.join()
            figures = {"error": f"its process ended with status {process.exitcode}", "killed": True}
        figures.setdefault("wall_seconds", round(time.time() - begin, 2))
        results.record(name, figures)
        print(f"{name}: {figures.get('error', 'ok')} ({figures['wall_seconds']:.1f} s)", flush=True)
        if needs_another:
            return False
    return True


def end(process: multiprocessing.process.BaseProcess) -> None:
    """With the tools and compilers that it started."""
    if process.is_alive() and process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group yet
            process.kill()
    process.join()


if __name__ == "__main__":
    sys.exit(main())
