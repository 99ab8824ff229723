"""Do the tests notice small faults in the sources and recipes? A random sample of all that `tools.mutants` can make.

    python -m tools.mutation --sample 400                        writes reports/reliability/mutation.md
    python -m tools.mutation --scope ops --sample 60             ops and caches alone; or any prefix of a path
    python -m tools.mutation --scope ops --sample 60 --root ../before --folder ../faults-before
    python -m tools.mutation --compare ../faults-before ../faults-after   the same faults twice

Each fault is made in a copy and meets the tests of its part (`tools.parts`). What is drawn depends on the seed and on
each fault alone, so that samples of two versions differ only by the faults that just one of them has. A run that was
stopped goes on when it is given its --folder again.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.reporting import made_by, table, write_page
from tools.faulty_copy import FaultyCopy
from tools.mutants import Mutant, mutants_of
from tools.parts import files_in, relevant_tests

ROOT = Path(__file__).parents[1]
NOTICED, SURVIVED, FAILING = "noticed", "survived", "tests fail"


def population(root: Path, scope: str) -> list[Mutant]:
    files = files_in(root, scope)
    return [mutant for file in files for mutant in mutants_of(file, (root / file).read_text(encoding="utf-8"))]


def drawn(mutants: Iterable[Mutant], sample: int, seed: int) -> list[Mutant]:
    """Those of the smallest ranks, in the order of their files: the tests of a part run one after another."""
    chosen = sorted(mutants, key=lambda mutant: mutant.rank(seed))[:sample]
    return sorted(chosen, key=lambda mutant: (mutant.file, mutant.start))


def read(folder: Path) -> dict[str, dict]:
    """What is known: the name of a mutant → its file, verdict and seconds."""
    path = folder / "verdicts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def try_all(root: Path, folder: Path, chosen: list[Mutant]) -> None:
    """A verdict on each mutant that has none yet, written as soon as it is there."""
    copy, known = FaultyCopy(root, folder), read(folder)
    for number, mutant in enumerate(chosen, 1):
        if mutant.name in known:
            continue
        tests = [path for path in relevant_tests(mutant.file) if (root / path).exists()]
        begin = time.monotonic()
        try:
            verdict = NOTICED if copy.notices(mutant.file, mutant.start, mutant.end, mutant.new, tests) else SURVIVED
        except RuntimeError as error:
            verdict = FAILING
            print(f"{mutant.file}: {error}", file=sys.stderr)
        seconds = round(time.monotonic() - begin, 1)
        entry = {"name": mutant.name, "file": mutant.file, "verdict": verdict, "seconds": seconds}
        with (folder / "verdicts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{number}/{len(chosen)} {verdict}: {mutant.name}", flush=True)


def score(entries: Iterable[dict]) -> str:
    found = [entry["verdict"] for entry in entries if entry["verdict"] != FAILING]
    noticed = found.count(NOTICED)
    return f"{noticed} of {len(found)} noticed" + (f", {noticed / len(found):.1%}" if found else "")


def part_of(file: str) -> str:
    """The op, family or folder that a file belongs to, as a row of the table."""
    parts = file.removeprefix("src/hf_hybrid_ssm/").split("/")
    return "/".join(parts[:2]) if parts[0] in ("ops", "models", "recipes") and len(parts) > 2 else parts[0]


def write(seed: int, mutants: list[Mutant], entries: list[dict]) -> None:
    made: dict[str, int] = defaultdict(int)
    for mutant in mutants:
        made[part_of(mutant.file)] += 1
    tried: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        tried[part_of(entry["file"])].append(entry["verdict"])
    kinds = (NOTICED, SURVIVED, FAILING)
    rows = [[part, made[part], len(of), *map(of.count, kinds)] for part, of in sorted(tried.items())]
    survivors = [f"- `{entry['name']}`" for entry in entries if entry["verdict"] == SURVIVED]
    path = write_page(
        "reliability/mutation.md",
        "Mutation testing",
        made_by("python -m tests.reporting mutation", ("src/hf_hybrid_ssm", "recipes", "tests")),
        f"{len(entries)} of the {len(mutants):,} faults that `tools.mutants` can make in the package and the recipes, "
        f"drawn with seed {seed}, each against the tests of its part: **{score(entries)}** (a test failed, hung or "
        "crashed). C files are not among them.",
        table(["part", "faults", "tried", *kinds], rows),
        "Each fault is in `mutation.json`. Not all survivors are mistakes: some change nothing that can be seen.",
        "## Survivors",
        "\n".join(survivors) or "None.",
    )
    path.with_suffix(".json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def compare(before: Path, after: Path) -> None:
    """The score of two runs on the faults that both tried, and which of these changed."""
    first, second = read(before), read(after)
    common = sorted(first.keys() & second.keys())
    print(f"before: {score(first.values())}; after: {score(second.values())}")
    scores = (score(known[name] for name in common) for known in (first, second))
    print(f"the {len(common)} faults of both: before {next(scores)}; after {next(scores)}")
    for name in common:
        if (was := first[name]["verdict"]) != (now := second[name]["verdict"]):
            print(f"{was} -> {now}: {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scope", default="all", help="all, src, recipes, ops, or a prefix of a path")
    parser.add_argument("--sample", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=ROOT, help="another version of the repository to try")
    parser.add_argument("--folder", type=Path, help="of an earlier run, to go on with")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="folders of two runs")
    arguments = parser.parse_args()
    if arguments.compare:
        compare(*arguments.compare)
        return 0
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="mutation-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    mutants = population(arguments.root, arguments.scope)
    if not mutants:
        parser.error(f"--scope {arguments.scope}: there is no such file in src/hf_hybrid_ssm or recipes.")
    chosen = drawn(mutants, arguments.sample, arguments.seed)
    print(f"{len(chosen)} of {len(mutants)} faults; verdicts in {folder}", flush=True)
    try_all(arguments.root.resolve(), folder, chosen)
    known = read(folder)
    entries = [known[mutant.name] for mutant in chosen]
    print(score(entries))
    if arguments.scope == "all" and arguments.root == ROOT:
        write(arguments.seed, mutants, entries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
