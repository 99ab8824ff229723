"""Run random programs, or one program again.

    python -m tests.programs.run --cases 10000 --report programs.md
    python -m tests.programs.run --seed 17
    python -m tests.programs.run --program '{"variant": "longhorn", ...}'

Exits with 1 if a program failed; each failure is printed as a line of JSON, to be cut down by hand and run again.
"""

import argparse
import sys
import time

import transformers

from tests.programs.generate import generate
from tests.programs.interpreter import run
from tests.programs.models import VARIANTS
from tests.programs.program import Program
from tests.programs.report import Tally, write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of them")
    parser.add_argument("--variant", choices=VARIANTS, help="of this model alone")
    parser.add_argument("--seed", type=int, help="run the program of this seed, and print it")
    parser.add_argument("--program", help="run this program, a line of JSON")
    parser.add_argument("--report", help="write a page of this name in reports/")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.program is not None or options.seed is not None:
        text = options.program
        return _again(generate(options.seed, options.variant) if text is None else Program.loads(text))
    start, tally = time.perf_counter(), Tally()
    try:
        for seed in range(options.first, options.first + options.cases):
            _one(seed, options.variant, tally)
    except KeyboardInterrupt:
        print(f"interrupted: {tally.cases} of {options.cases} programs were run")
    seconds = time.perf_counter() - start
    print(f"{tally.cases} programs, {tally.failures} failed, {seconds:.0f} s")
    print("largest deviation " + ", ".join(f"{dtype} {value:.1e}" for dtype, value in tally.deviations.items()))
    if options.report is not None:
        write(options.report, tally, " ".join(["python -m tests.programs.run", *sys.argv[1:]]))
    return 1 if tally.failures else 0


def _one(seed: int, variant: str | None, tally: Tally) -> None:
    program = generate(seed, variant)
    outcome = run(program)
    tally.add(seed, program, outcome)
    if tally.cases % 500 == 0:
        print(f"{tally.cases} programs, {tally.failures} failed", flush=True)
    if outcome.failure is not None:
        print(f"seed {seed}, {program.variant}, {outcome.failure.splitlines()[0]}\n  {program.dumps()}", flush=True)


def _again(program: Program) -> int:
    outcome = run(program)
    print(program.dumps())
    where = "" if outcome.failure is None else f" at step {outcome.step}"
    print(
        f"{outcome.failure or 'passed'}{where}; largest deviation {outcome.deviation:.1e} in {outcome.tokens} tokens"
    )
    return 0 if outcome.failure is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
