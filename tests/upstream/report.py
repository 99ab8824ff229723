"""Run transformers' own tests on every family and on peers of transformers, and write the table of what came out.

    python -m tests.reporting upstream

Writes reports/upstream.md. Exits with 1 if a test of this package's families failed.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import transformers

from tests.conftest import LEFT_OUT
from tests.reporting import made_by, table, write_page

FOLDER = Path(__file__).parent
INTRODUCTION = f"""\
`ModelTesterMixin`, `ConfigTester` and the training mixin come from the source distribution of transformers
{transformers.__version__} (downloaded, not copied); its generation mixin is not in it, `generation_checks.py` checks
the same things. Mamba, Jamba, Llama and T5 of transformers run under the same harness, in
their plain torch path.

A skip is a test that transformers skips by itself for a model without the feature, or one of ours with the reason
given in the test file; where its decorators or first lines say so, it is left out when collected. Families without
full attention skip what Mamba skips: window attention in blocks forms no matrix of weights that `output_attentions`
could return. One more than Mamba: rotary scaling, where there is no rotary embedding."""
KINDS = ("passed", "failed", "skipped", "left out")


class Collector:
    """Counts outcomes and the reasons of skips, by test class."""

    def __init__(self):
        self.outcomes: dict[str, Counter] = defaultdict(Counter)
        self.reasons: dict[str, Counter] = defaultdict(Counter)
        self.failed: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.split("::")[1].partition("[")[0]
        is_part = type(report).__name__ == "SubtestReport"  # counted where it fails: its test is counted by itself
        if report.outcome != "failed" and (is_part or (report.when != "call" and report.outcome == "passed")):
            return
        self.outcomes[name][report.outcome] += 1
        if report.outcome == "failed":
            self.failed[name].append(report.nodeid.split("::")[-1])
        if report.outcome == "skipped":
            self._because(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr, name)

    def pytest_terminal_summary(self, config):
        for test, reason in config.stash[LEFT_OUT].items():
            name = test.split("::")[1].partition("[")[0]
            self.outcomes[name]["left out"] += 1
            self._because(reason, name)

    def _because(self, reason, name: str) -> None:
        told = str(reason).removeprefix("Skipped: ")
        self.reasons[re.sub(r"<class '[\w.]+\.(\w+)'>", r"\1", told)][name] += 1


def write(collector: Collector, made: str) -> None:
    """reports/upstream.md, and all reasons of skips in upstream.json."""
    rows = [[name, *(of[kind] for kind in KINDS)] for name, of in sorted(collector.outcomes.items())]
    failures = [f"- {name}: {', '.join(sorted(set(tests)))}" for name, tests in sorted(collector.failed.items())]
    kinds: dict[str, Counter] = defaultdict(Counter)
    for reason, classes in collector.reasons.items():
        kinds[re.sub(r"^\w+Model\b", "The model", reason)].update(classes)
    ours = {reason: of for reason, of in kinds.items() if not any(name.endswith("Peer") for name in of)}
    told = f"{len(kinds)} in `upstream.json`, {len(ours)} of them of no test of transformers' own models."
    parts = (INTRODUCTION, table(["test class", *KINDS], rows), "## Failures", "\n".join(failures) or "None.")
    parts += ("## Reasons of skips, and of what is left out", told)
    path = write_page("upstream.md", "transformers' own tests", made, *parts)
    found = {"made": made, "outcomes": collector.outcomes, "failed": collector.failed, "skips": collector.reasons}
    path.with_suffix(".json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main() -> int:
    collector = Collector()
    files = [str(path) for path in sorted(FOLDER.glob("test_*.py"))]
    pytest.main(["-q", "-n", "2", "--dist", "worksteal", *files, str(FOLDER / "peers.py")], plugins=[collector])
    write(
        collector,
        made_by(
            "python -m tests.reporting upstream",
            ("src/hf_hybrid_ssm/models", "src/hf_hybrid_ssm/layers", "tests/upstream"),
        ),
    )
    return int(any(tests for name, tests in collector.failed.items() if not name.endswith("Peer")))


if __name__ == "__main__":
    sys.exit(main())
