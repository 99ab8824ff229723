"""The generated pages in reports/: how a run of tests becomes one, and which are older than what they are about.

    python -m tests.reporting                       the pages whose sources changed after they were made
    python -m tests.reporting --make numerics       make a page anew (or several) from a run of its tests
    python -m tests.reporting --stamp PAGE          say in a page that another command wrote what it was made from

A page that is made takes every variant where `make test` takes a few (`THOROUGH`). Tests put figures on a page by
pytest's `record_property`; a test with a parameter `row` is a column of a table with a line for each row.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reports"
THOROUGH = "HF_HYBRID_SSM_PAGE" in os.environ
MODELS = ("src/hf_hybrid_ssm/models", "src/hf_hybrid_ssm/layers", "src/hf_hybrid_ssm/ops")


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


MISUSES = ("misuse_of_configurations", "misuse_of_files", "misuse_of_models", "misuse_of_ops")
PAGES = {
    "roundtrips": _reliability("roundtrips", "Saving and loading, bit by bit"),
    "determinism": _reliability("determinism", "The same seed, the same bits"),
    "numerics": _reliability("numerics", "Finite and close"),
    "misuse": _reliability("misuse", "What the API answers to mistakes", "src/hf_hybrid_ssm", files=MISUSES),
    "fuzz": _reliability(
        "fuzz",
        "Random configurations, damaged files",
        *(*MODELS, "src/hf_hybrid_ssm/hub"),
        files=("fuzz", "fuzz_files"),
    ),
    "crash": _reliability("crash", "Training that is killed", "src/hf_hybrid_ssm/training"),
    "scale": Page(
        "reliability/scale.md",
        "Several processes, and plans",
        ("tests/distributed", "tests/test_planning.py"),
        (*MODELS, "src/hf_hybrid_ssm/training", "src/hf_hybrid_ssm/planning"),
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
            "trl",
        ),
        processes=1,  # in a process of their own, which starts again after a crash
    ),
}

# pages that other commands write: the command, and what they are about
STAMPED = {
    "planning.md": ("make plans", *MODELS, "src/hf_hybrid_ssm/planning"),
    "programs.md": ("make programs", *MODELS, "tests/programs"),
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
    commits = git("log", "--format=%h", f"{commit[1]}..HEAD", "--", *re.findall(r"`([^`]+)`", about[1])).split()
    return f"was made from {commit[1]}; its sources changed in {len(commits)} commits since" if commits else None


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
    """Collects the reports of a run and writes the page at its end."""

    def __init__(self, page: Page, name: str):
        self.page = page
        self.reports: list[pytest.TestReport] = []
        # of the sources as they are when the run begins
        self.made = made_by(f"python -m tests.reporting --make {name}", page.about, page.libraries)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.reports.append(report)

    def pytest_sessionfinish(self) -> None:
        write_page(self.page.path, self.page.title, self.made, *sections(self.reports))


def sections(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Of each module its tables; then the tests that have no figures, expected failures, and failures."""
    modules: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    limits: dict[tuple[str, str], list] = defaultdict(list)
    counted, failed, parts = [], [], []
    for report in sorted(reports, key=lambda report: report.location[:2]):
        path, _, name = report.nodeid.partition("::")
        modules[path][name.split("[")[0]].append(report)
    for functions in modules.values():
        told = dict(next(iter(functions.values()))[0].user_properties)["test"]
        title, _, text = told["module"].partition("\n")
        shown = []
        if columns := {name: of for name, of in functions.items() if "row" in _parameters(of[0])}:
            shown.append(_matrix(columns))
        for name, of in functions.items():
            if name not in columns and any(_figures(report) for report in of):
                doc = dict(of[0].user_properties)["test"]["doc"]
                shown += [f"### {_words(name)}", _paragraph(doc), _rows(of)]
            elif name not in columns:
                passed = sum(report.outcome == "passed" for report in of)
                counted.append([_words(name), len(of), passed, sum(r.outcome == "skipped" for r in of)])
            for report in of:
                if hasattr(report, "wasxfail"):
                    limits[_words(name), report.wasxfail.partition(" (`")[0]].append(report)
                elif report.outcome == "failed":
                    failed.append([report.nodeid, error_line(report)])
        if shown:
            parts += [f"## {title.rstrip('.')}", _paragraph(text), *shown]
    if counted:
        parts += ["## Tests without figures", table(["test", "cases", "passed", "skipped"], counted)]
    if limits:
        rows = [[column, _where(of), of[0].wasxfail] for (column, _), of in limits.items()]
        parts += ["## Expected failures", table(["test", "of", "the limit, and its first error"], rows)]
    return [*parts, "## Failures", table(["test", "error"], failed) if failed else "None."]


def _parameters(report: pytest.TestReport) -> dict[str, str]:
    return dict(report.user_properties)["test"]["parameters"]


def _where(reports: list) -> str:
    return "; ".join(", ".join(_parameters(report).values()) for report in reports)


def _figures(report: pytest.TestReport) -> dict[str, Any]:
    return {name: value for name, value in report.user_properties if name != "test"}


def _words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _paragraph(text: str) -> str:
    """A docstring without its indentation; a command in it stays as it is."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def error_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else str(report.longrepr)).split())[:300]


def _mark(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "limit"
    return {"passed": "yes", "failed": "no", "skipped": "-"}[report.outcome]


def _matrix(columns: dict[str, list]) -> str:
    rows = list(dict.fromkeys(_parameters(report)["row"] for reports in columns.values() for report in reports))
    cells = {(name, _parameters(report)["row"]): _mark(report) for name, of in columns.items() for report in of}
    return table(
        ["", *map(_words, columns)], ([row, *(cells.get((name, row), "-") for name in columns)] for row in rows)
    )


def _rows(reports: list) -> str:
    parameters = list(_parameters(reports[0]))
    figures = list(dict.fromkeys(name for report in reports for name in _figures(report)))
    return table(
        [*parameters, *figures, "passed"],
        (
            [*_parameters(report).values(), *(_figures(report).get(name, "") for name in figures), _mark(report)]
            for report in reports
        ),
    )


def make(name: str, arguments: list[str]) -> int:
    page = PAGES[name]
    environment = os.environ | {
        "HF_HYBRID_SSM_PAGE": name,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.reporting", "--page", name, *page.tests, *arguments]
    command += ["-n", str(page.processes), "--timeout", "1800"] if page.processes else []
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", nargs="+", choices=PAGES, help="make these pages anew")
    parser.add_argument("--stamp", type=Path, metavar="PAGE", help="a page that was written just now")
    options, arguments = parser.parse_known_args()
    if options.stamp:
        stamp(options.stamp)
        return 0
    if options.make:
        return max(make(name, arguments) for name in options.make)
    reasons = {page: outdated(page) for page in sorted(REPORTS.rglob("*.md")) if page.name != "README.md"}
    for page, reason in reasons.items():
        print(f"{page.relative_to(ROOT)}: {reason or 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
