"""Counts of what was run, as a page and as JSON."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs.interpreter import TOLERANCE, Outcome
from tests.programs.models import VARIANTS
from tests.programs.program import Feed, Illegal, Program
from tests.reporting import made_by

INTRODUCTION = """# Random programs

A program is a list of instructions (feed, crop, reorder, select, repeat, reset, deepcopy, switch, compile, and illegal
ones that must be refused and change nothing) run on a tiny model and its cache. After every feed the outputs of all
real tokens are compared with a float64 forward of the token's document alone, without cache, mask or packing, by the
step-by-step reference implementations. A deviation is relative to the largest value expected of the token (at least
1); a program fails above {bounds}. Written by `python -m tests.reporting programs`.
"""


@dataclass
class Tally:
    """What `add` has seen, counted in several ways; each count is (programs, failures)."""

    cases: int = 0
    failures: int = 0
    tokens: int = 0
    counts: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    failed: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    deviations: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOLERANCE, 0.0))
    failed_seeds: dict[int, str] = field(default_factory=dict)
    shrunk: dict[int, str] = field(default_factory=dict)

    def add(self, seed: int, program: Program, outcome: Outcome) -> None:
        self.cases += 1
        self.tokens += outcome.tokens
        for title, names in _kinds(program).items():
            self.counts[title].update(names)
            if outcome.failure is not None:
                self.failed[title].update(names)
        if outcome.failure is not None:
            self.failures += 1
            self.failed_seeds[seed] = f"{program.variant}: {outcome.failure.splitlines()[0]}"
        else:
            self.deviations[program.dtype] = max(self.deviations[program.dtype], outcome.deviation)


def _kinds(program: Program) -> dict[str, set[str]]:
    """What a program is counted under: title of a table → names in it."""
    feeds = [step for step in program.steps if isinstance(step, Feed)]
    return {
        "Family": {VARIANTS[program.variant].family},
        "Model": {program.variant},
        "Head": {program.head},
        "Cache": {program.cache + (", recording" if program.record else "")},
        "Precision": {program.dtype},
        "Instruction": program.instructions,
        "Illegal step": {step.kind for step in program.steps if isinstance(step, Illegal)},
        "Packing form": {feed.packing for feed in feeds},
        "Mask": {("padded" if feed.is_padded else "unpadded") + ", mask " + feed.mask for feed in feeds},
        "Inputs": {"embeds, NaN at padding" if feed.inputs == "nan" else feed.inputs for feed in feeds},
    }


def write(path: Path, tally: Tally, command: str, seconds: float) -> None:
    """PATH.json and PATH.md."""
    result = {
        "made": made_by(command),
        "seconds": round(seconds),
        "programs": tally.cases,
        "failures": tally.failures,
        "tokens_compared": tally.tokens,
        "largest_deviation": tally.deviations,
        "tolerance": TOLERANCE,
        "counts": {
            title: {name: [count, tally.failed[title][name]] for name, count in sorted(counter.items())}
            for title, counter in tally.counts.items()
        },
        "failed": {str(seed): text for seed, text in list(tally.failed_seeds.items())[:50]},
        "shrunk": {str(seed): text for seed, text in tally.shrunk.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(_page(result))


def _page(result: dict) -> str:
    bounds = " and ".join(f"{value:.0e} in {dtype}" for dtype, value in TOLERANCE.items())
    largest = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in result["largest_deviation"].items())
    lines = [
        INTRODUCTION.format(bounds=bounds),
        result["made"],
        "",
        f"**{result['programs']} programs, {result['failures']} failures**; {result['tokens_compared']} outputs "
        f"compared, largest deviation {largest}.",
        "",
        "| | programs |",
        "| --- | --- |",
    ]
    for title, counter in result["counts"].items():
        each = (
            f"{name} {count}{f' ({failed} failed)' if failed else ''}" for name, (count, failed) in counter.items()
        )
        lines.append(f"| {title} | {'; '.join(each)} |")
    if result["failed"]:
        lines += ["", "## Failures", "", *(f"- seed {seed}, {text}" for seed, text in result["failed"].items())]
    return "\n".join(lines) + "\n"
