"""Everything that is to be known about a card, in commands of at most ten minutes; a run that was killed or ran out of
time goes on.

    make gpu GPU_OUT=/somewhere                      # on a card; run it again until it says that all is done
    make gpu GPU_OUT=/new GPU_FROM=/old/gpu.tar.gz   # on a fresh machine: goes on where the archive ends
    python -m benchmarks.gpu --parts scan --cases "N=16|forward$"   # what has such a name
    python -m benchmarks.gpu --device cpu --rehearse # every code path with tiny sizes, without a card

After every case the results of all parts, benchmarks/results/gpu_<part>.json, are packed into GPU_OUT/gpu.tar.gz; at
the end the page, reports/gpu.md, with them. (A rehearsal has a folder of its own for both.) A case takes at most four
minutes (`--longest`), and none starts that could not end within the ten. It needs `src`, `benchmarks` and `recipes` of
the source tree, and no network. A change of the sources has those cases run again that are about them (`parts.about`).

Status 0: every case that was asked for and has run is right; 1: one is not; 2: this cannot run.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.requirements import missing_peers, problems

if TYPE_CHECKING:
    from benchmarks.gpu.store import Store

ROOT = Path(__file__).parents[2]
BEGIN = time.time()
LONGEST_CASE = 240  # seconds, of which compiling is the most
AT_THE_END = 30  # seconds: a process that is killed, and the page


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes; needed on a CPU")
    parser.add_argument("--minutes", type=float, default=5, help="start no case after so many (default: 5)")
    parser.add_argument("--limit", type=float, default=10, help="minutes after which all has ended (default: 10)")
    parser.add_argument("--longest", type=float, default=LONGEST_CASE, help="seconds that a case may take (240)")
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--cases", type=pattern, default=pattern(""), help="only cases in whose names this is found")
    parser.add_argument("--again", action="store_true", help="run what is on record once more; its results are kept")
    parser.add_argument("--results", type=Path, help="folder of the JSON files")
    parser.add_argument("--out", type=Path, help="folder of gpu.tar.gz, the archive of all results and the page")
    parser.add_argument("--resume", type=Path, help="an archive whose results count as recorded")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and not arguments.rehearse:
        parser.error("--device cpu needs --rehearse: this measures cards")
    if 60 * arguments.limit < arguments.longest + AT_THE_END:
        longest = arguments.longest + AT_THE_END
        parser.error(f"--limit {arguments.limit:g}: a case and the page take {longest:g} seconds, see --longest")
    if arguments.resume and not arguments.resume.is_file():
        parser.error(f"--resume {arguments.resume}: there is no such file")
    default = "runs/gpu_rehearsal" if arguments.rehearse else "benchmarks/results"
    arguments.results = arguments.results or ROOT / default
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
    from benchmarks.gpu.parts import DONE, OUT_OF_TIME, PARTS
    from benchmarks.gpu.report import failures, summary, write_report
    from benchmarks.gpu.settings import Settings
    from benchmarks.gpu.store import Store

    parts = arguments.parts or list(PARTS)
    if unknown := sorted(set(parts) - set(PARTS)):
        print(f"{unknown} are not among the parts {list(PARTS)}", file=sys.stderr)
        return 2
    settings = Settings(arguments.device, arguments.rehearse)
    identity = {"device": device_name(settings.device), "rehearsal": settings.rehearse}
    store = Store(arguments.results, identity, archive=arguments.out and arguments.out.resolve() / "gpu.tar.gz")
    if arguments.until:  # the child
        from benchmarks.gpu.child import run_cases

        return run_cases(settings, store, parts, arguments.until, arguments.cases)
    if peers := missing_peers():
        print(f"Not compared with, since they are not installed: {', '.join(peers)}.", flush=True)
    if arguments.resume:
        print(f"{store.resume(arguments.resume)} cases come from {arguments.resume}.", flush=True)
    if arguments.again:
        for part in parts:
            store.set_aside(part, [case for case in store.cases(part) if arguments.cases.search(case)])
    code = run_to_the_end(arguments, parts, store)
    if code not in (DONE, OUT_OF_TIME):
        return code
    where = write_report(store, settings, ROOT if not settings.rehearse else arguments.results)
    store.pack(where)
    print(f"{summary(store)}; {where}", flush=True)
    on_record = {f"{part}: {case}": found for part in parts for case, found in store.cases(part).items()}
    asked = {case: found for case, found in on_record.items() if arguments.cases.search(case.partition(": ")[2])}
    if code == OUT_OF_TIME:
        print("Out of time: run the same command again, and it goes on where it stopped.", flush=True)
    elif not asked:
        print(f"--cases {arguments.cases.pattern!r} is found in no case of {parts}", file=sys.stderr)
        return 2
    return int(bool(failures(asked)))


def run_to_the_end(arguments: argparse.Namespace, parts: list[str], store: "Store") -> int:
    """DONE or OUT_OF_TIME; another status is of a process that ended before its first case."""
    from benchmarks.gpu.parts import DONE, FATAL, OUT_OF_TIME

    store.running.unlink(missing_ok=True)
    until = last_start(BEGIN, arguments.minutes, arguments.limit, arguments.longest)
    while True:
        code = watch(arguments, parts, until, store.running)
        if killed := store.record_killed(f"its process ended with status {code}"):
            print(f"{killed}: its process ended with status {code}", flush=True)
        elif code in (DONE, OUT_OF_TIME):
            return code
        elif code != FATAL:
            print(f"the process that runs the cases ended with status {code} before the first", file=sys.stderr)
            return code


def last_start(begin: float, minutes: float, limit: float, longest: float = LONGEST_CASE) -> float:
    """When the last case may start, in seconds since the epoch: one that takes its longest ends within the limit."""
    return begin + min(60 * minutes, 60 * limit - longest - AT_THE_END)


def watch(arguments: argparse.Namespace, parts: list[str], until: float, mark: Path) -> int:
    """Run the cases in a process of their own, and end it if one of them takes too long."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", arguments.device, "--until", str(until)]
    command += ["--results", str(arguments.results.resolve()), "--parts", *parts]
    command += ["--cases", arguments.cases.pattern]
    command += ["--rehearse"] if arguments.rehearse else []
    command += ["--out", str(arguments.out.resolve())] if arguments.out else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if arguments.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    while process.poll() is None:
        time.sleep(0.2)
        if age(mark) > arguments.longest:
            process.kill()
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
