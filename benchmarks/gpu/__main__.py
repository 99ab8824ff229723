"""Everything that is to be known about a card, in one command; a run that was killed or ran out of time goes on.

    make gpu                                                 # on a card; at most 25 minutes
    make gpu GPU_ARGS="--minutes 8"                          # a slice; run it again until it says that all is done
    python -m benchmarks.gpu --device cpu --rehearse         # every code path with tiny sizes, without a card

Writes benchmarks/results/gpu_<part>.json after every case, and reports/gpu.md at the end (a rehearsal: both to a
folder of its own). It needs the source tree and no network.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.requirements import missing_peers, problems

ROOT = Path(__file__).parents[2]
LONGEST_CASE = 240  # seconds


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes; needed on a CPU")
    parser.add_argument("--minutes", type=float, default=25, help="start no case after so many (default: 25)")
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--again", action="store_true", help="forget what is recorded of the parts")
    parser.add_argument("--results", type=Path, help="folder of the JSON files")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and not arguments.rehearse:
        parser.error("--device cpu needs --rehearse: this measures cards")
    default = "runs/gpu_rehearsal" if arguments.rehearse else "benchmarks/results"
    arguments.results = arguments.results or ROOT / default
    return arguments


def main() -> int:
    arguments = arguments_of()
    if found := problems(arguments.device):
        print("\n".join(["This cannot run:", *found]), file=sys.stderr)
        return 2
    from benchmarks.gpu.child import DONE, FATAL, OUT_OF_TIME, PARTS, run_cases
    from benchmarks.gpu.report import summary, write_report
    from benchmarks.gpu.settings import Settings
    from benchmarks.gpu.store import Store

    parts = arguments.parts or list(PARTS)
    if unknown := sorted(set(parts) - set(PARTS)):
        print(f"{unknown} are not among the parts {list(PARTS)}", file=sys.stderr)
        return 2
    settings = Settings(arguments.device, arguments.rehearse)
    store = Store(arguments.results, {"device": device_name(settings.device), "rehearsal": settings.rehearse})
    if arguments.until:  # the child
        return run_cases(settings, store, parts, arguments.until)
    if peers := missing_peers():
        print(f"Not compared with, since they are not installed: {', '.join(peers)}.", flush=True)
    if arguments.again:
        for part in parts:
            store.path(part).unlink(missing_ok=True)
    store.running.unlink(missing_ok=True)
    until = time.time() + 60 * arguments.minutes
    code = FATAL
    while code not in (DONE, OUT_OF_TIME):
        code = watch(arguments, parts, until, store.running)
        killed = store.record_killed(f"its process ended with status {code}")
        if killed:
            print(f"{killed}: its process ended with status {code}", flush=True)
        elif code not in (DONE, OUT_OF_TIME, FATAL):
            print(f"the process that runs the cases ended with status {code} before the first", file=sys.stderr)
            return code
    where = write_report(store, settings, ROOT if not settings.rehearse else arguments.results)
    print(f"{summary(store)}; {where}", flush=True)
    if code == OUT_OF_TIME:
        print("Out of time: run the same command again, and it goes on where it stopped.", flush=True)
    return 0


def watch(arguments: argparse.Namespace, parts: list[str], until: float, mark: Path) -> int:
    """Run the cases in a process of their own, and end it if one of them takes too long."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", arguments.device, "--until", str(until)]
    command += ["--results", str(arguments.results), "--parts", *parts]
    command += ["--rehearse"] if arguments.rehearse else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if arguments.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    while process.poll() is None:
        time.sleep(0.2)
        if mark.is_file() and time.time() - mark.stat().st_mtime > LONGEST_CASE:
            process.kill()
    return process.wait()


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
