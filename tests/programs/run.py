"""Run random programs, or one program again.

    python -m tests.programs.run --cases 10000 --report reports/programs
    python -m tests.programs.run --seed 17
    python -m tests.programs.run --program '{"variant": "longhorn", ...}'

Exits with 1 if a program failed; each failure is printed as a line of JSON after it was made small.
"""

import argparse
import sys
import time
from pathlib import Path

import transformers

from tests.programs.generate import generate
from tests.programs.interpreter import run
from tests.programs.models import VARIANTS
from tests.programs.program import Program
from tests.programs.report import Tally, write
from tests.programs.shrink import shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of them")
    parser.add_argument("--variant", choices=VARIANTS, help="of this model alone")
    parser.add_argument("--seed", type=int, help="run the program of this seed, and print it")
    parser.add_argument("--program", help="run this program, a line of JSON")
    parser.add_argument("--report", type=Path, help="write PATH.md and PATH.json")
    parser.add_argument("--shrink", type=int, default=20, help="how many of the failures to make small")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.program is not None or options.seed is not None:
        text = options.program
        return _again(generate(options.seed, options.variant) if text is None else Program.loads(text))
    start, tally = time.perf_counter(), Tally()
    try:
        for seed in range(options.first, options.first + options.cases):
            _one(seed, options.variant, tally, options.shrink)
    except KeyboardInterrupt:
        print(f"interrupted: {tally.cases} of {options.cases} programs were run")
    seconds = time.perf_counter() - start
    print(f"{tally.cases} programs, {tally.failures} failed, {seconds:.0f} s")
    print("largest deviation " + ", ".join(f"{dtype} {value:.1e}" for dtype, value in tally.deviations.items()))
    if options.report is not None:
        write(options.report, tally, " ".join(["python -m tests.programs.run", *sys.argv[1:]]), seconds)
    return 1 if tally.failures else 0


def _one(seed: int, variant: str | None, tally: Tally, shrinkings: int) -> None:
    program = generate(seed, variant)
    outcome = run(program)
    tally.add(seed, program, outcome)
    if tally.cases % 500 == 0:
        print(f"{tally.cases} programs, {tally.failures} failed", flush=True)
    if outcome.failure is None:
        return
    print(f"seed {seed}, {program.variant}, {outcome.failure.splitlines()[0]}", flush=True)
    if tally.failures <= shrinkings:
        small = shrink(program, outcome)
        tally.shrunk[seed] = small.dumps()
        print(f"  {run(small).failure}\n  {small.dumps()}", flush=True)


def _again(program: Program) -> int:
    outcome = run(program)
    print(program.dumps())
    where = "" if outcome.failure is None else f" at step {outcome.step}"
    print(
        f"{outcome.failure or 'passed'}{where}; largest deviation {outcome.deviation:.1e} in {outcome.tokens} tokens"
    )
    if outcome.failure is None:
        return 0
    print(shrink(program, outcome).dumps())
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
