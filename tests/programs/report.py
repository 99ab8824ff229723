"""Counts of what was run, as a page."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs.interpreter import TOLERANCE, Outcome
from tests.programs.models import VARIANTS
from tests.programs.program import Feed, Illegal, Program
from tests.reporting import made_by, table, write_page

INTRODUCTION = """\
A program is a list of instructions (feed, crop, reorder, select, repeat, reset, deepcopy, switch, compile, and illegal
ones that must be refused and change nothing) run on a tiny model and its cache. After every feed the outputs of all
real tokens are compared with a float64 forward of the token's document alone, without cache, mask or packing, by the
step-by-step reference implementations. A deviation is relative to the largest value expected of the token (at least
1); a program fails above {bounds}."""


@dataclass
class Tally:
    """What `add` has seen, counted in several ways: title of a table → name → programs."""

    cases: int = 0
    tokens: int = 0
    counts: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    deviations: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOLERANCE, 0.0))
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        return len(self.failed)

    def add(self, seed: int, program: Program, outcome: Outcome) -> None:
        self.cases += 1
        self.tokens += outcome.tokens
        for title, names in _kinds(program).items():
            self.counts[title].update(names)
        if outcome.failure is not None:
            self.failed[seed] = f"{program.variant}: {outcome.failure.splitlines()[0]}"
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


def write(path: Path | str, tally: Tally, command: str) -> None:
    """A page in reports/."""
    by_dtype = (TOLERANCE, tally.deviations)
    bounds, largest = (", ".join(f"{value:.0e} in {dtype}" for dtype, value in of.items()) for of in by_dtype)
    count = f"**{tally.cases} programs, {tally.failures} failures**"
    said = f"{count}; {tally.tokens} outputs compared, largest deviation {largest}."
    rows = [
        [title, "; ".join(f"{name} {number}" for name, number in sorted(counter.items()))]
        for title, counter in tally.counts.items()
    ]
    failed = "\n".join(f"- seed {seed}, {text}" for seed, text in list(tally.failed.items())[:50])
    parts = (INTRODUCTION.format(bounds=bounds), said, table(["", "programs"], rows), failed)
    write_page(path, "Random programs", made_by(command), *parts)
