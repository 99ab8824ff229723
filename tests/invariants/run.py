"""Draw many cases of every invariance for every variant, and write what came out to reports/invariants.md.

    python -m tests.invariants.run --cases 10000

Exits with 1 if a case failed.
"""

import argparse
import time
from collections import defaultdict
from random import Random

import transformers

from tests.invariants.cases import CASES, COMBINATIONS
from tests.reporting import made_by, table, write_page
from tests.tiny_models import language_model

Found = dict[str, dict[str, list[float | None]]]
"""Case → variant → deviations; None for a failure."""
INTRODUCTION = """\
Every case draws a random model input and one way of batching, padding, packing, splitting, caching, re-ordering or
re-scoring it, and compares with one plain forward of each row alone (or, for the text rows, with greedy decoding
without a cache)."""


def run(cases: int, seed: int, only: list[str] | None = None) -> Found:
    random, found = Random(seed), defaultdict(lambda: defaultdict(list))
    combinations = [(case, variant) for case, variant in COMBINATIONS if case in (only or CASES)]
    for index in range(cases):
        case, variant = combinations[index % len(combinations)]
        case_seed = random.randrange(2**63)
        try:
            deviation = CASES[case](language_model(variant), Random(case_seed))
        except AssertionError as error:
            deviation = None
            print(f"{variant}, {case}, seed {case_seed}: {str(error).strip().splitlines()[0]}", flush=True)
        found[case][variant].append(deviation)
    return found


def write(found: Found, command: str, said: str) -> None:
    """What the variants of each invariance come to."""
    rows = []
    for case, variants in found.items():
        every = [deviation for deviations in variants.values() for deviation in deviations]
        largest = {name: max(filter(None, deviations), default=0.0) for name, deviations in variants.items()}
        worst = max(largest, key=largest.__getitem__)
        told = (f"{largest[worst]:.0e}", worst) if largest[worst] else ("0", "-")
        rows.append([case.replace("_", " "), len(variants), len(every), every.count(None), *told])
    head = ["invariance", "variants", "cases", "failures", "largest deviation", "of"]
    title = "Batching invariance, measured"
    write_page("invariants.md", title, made_by(command), INTRODUCTION, f"{said}.", table(head, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=CASES, help="these alone, without a page")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    start = time.perf_counter()
    found = run(options.cases, options.seed, options.only)
    every = [deviation for variants in found.values() for each in variants.values() for deviation in each]
    failures, largest = every.count(None), max(filter(None, every), default=0.0)
    said = (
        f"{len(every)} cases, {failures} failures, largest deviation of a float32 logit {largest:.1e} of the largest"
    )
    if not options.only:
        write(found, f"python -m tests.invariants.run --cases {options.cases} --seed {options.seed}", said)
    print(f"{said}, {time.perf_counter() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
