"""Draw many cases of every invariance for every variant, and write what came out.

    python -m tests.invariants.run --cases 10000

Writes reports/invariants.md and reports/invariants.json. Exits with 1 if a case failed.
"""

import argparse
import json
import time
from collections import defaultdict
from random import Random

import transformers

from tests.invariants.cases import CASES, COMBINATIONS
from tests.reporting import REPORTS, made_by, table, write_page
from tests.tiny_models import VARIANTS, language_model

RESULTS = REPORTS / "invariants.json"
INTRODUCTION = """\
Every case draws a random model input and one way of batching, padding, packing, splitting, caching, re-ordering or
re-scoring it, and compares with one plain forward of each row alone (or, for the text rows, with greedy decoding
without a cache)."""


def run(cases: int, seed: int, only: list[str] | None = None) -> dict:
    random = Random(seed)
    table: dict = defaultdict(lambda: {"cases": 0, "failures": 0, "max_deviation": 0.0})
    first_failures: list[str] = []
    combinations = [(case, variant) for case, variant in COMBINATIONS if case in (only or CASES)]
    for index in range(cases):
        case, variant = combinations[index % len(combinations)]
        case_seed = random.randrange(2**63)
        entry = table[f"{variant} | {case}"]
        entry["cases"] += 1
        try:
            entry["max_deviation"] = max(
                entry["max_deviation"], CASES[case](language_model(variant), Random(case_seed))
            )
        except AssertionError as error:
            entry["failures"] += 1
            first_failures.append(f"{variant}, {case}, seed {case_seed}: {str(error).strip().splitlines()[0]}")
    return {
        "cases": cases,
        "seed": seed,
        "failures": sum(entry["failures"] for entry in table.values()),
        "max_deviation": max(entry["max_deviation"] for entry in table.values()),
        "made": made_by(f"python -m tests.invariants.run --cases {cases} --seed {seed}"),
        "table": dict(sorted(table.items())),
        "first_failures": first_failures[:20],
    }


def write(result: dict) -> None:
    """reports/invariants.md: what the variants of each invariance come to; the JSON has them one by one."""
    rows = []
    for case in CASES:
        found = {variant: result["table"].get(f"{variant} | {case}") for variant in VARIANTS}
        entries = {variant: entry for variant, entry in found.items() if entry is not None}
        worst = max(entries, key=lambda variant: entries[variant]["max_deviation"])
        deviation, count = entries[worst]["max_deviation"], sum(entry["cases"] for entry in entries.values())
        failures = sum(entry["failures"] for entry in entries.values())
        told = (f"{deviation:.0e}", worst) if deviation else ("0", "-")
        rows.append([case.replace("_", " "), len(entries), count, failures, *told])
    count = f"{result['cases']} cases, {result['failures']} failures, largest deviation of a float32 logit"
    head = ["invariance", "variants", "cases", "failures", "largest deviation", "of"]
    parts = (INTRODUCTION, f"{count} {result['max_deviation']:.1e}. Each variant is in `{RESULTS.name}`.")
    write_page("invariants.md", "Batching invariance, measured", result["made"], *parts, table(head, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=CASES, help="these alone, into a file of their own")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    start = time.perf_counter()
    result = run(options.cases, options.seed, options.only)
    target = RESULTS.with_stem(f"invariants_{'_'.join(options.only)}") if options.only else RESULTS
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    if not options.only:
        write(result)
    print(f"{result['cases'] - result['failures']} passed, {result['failures']} failed")
    print(f"largest deviation {result['max_deviation']:.1e}, {time.perf_counter() - start:.0f} s")
    print("\n".join(result["first_failures"]))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
