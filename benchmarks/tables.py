"""Writes the tables of README.md and docs/ from the results, between `<!-- table: NAME -->` and `<!-- end -->`."""

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import speed_tables as speed
from benchmarks.table_text import RESULTS, load, markdown_table, mebibytes, rows_of
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import kinds_table

ROOT = Path(__file__).parents[1]
PROVENANCE = {"command", "machine", "commit"}
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _cache(tokens: int) -> Any:
    return lambda found: mebibytes(found["cache_bytes"][str(tokens)])


def _losses(models: dict) -> tuple[list[str], list[str]]:
    """Heads and columns of the last two stretches of positions, where loss was asked for."""
    parts = list(models["teacher"].get("loss", {"mean": ()})["mean"])[-2:]
    heads = [f"loss, tokens {part.replace('-', ' to ')}" for part in parts]
    return heads, [f"{{loss[mean][{part}]:.3f}}" for part in parts]


def needles(figures: dict) -> str:
    """Needles right with Wilson's intervals, loss by position where it was asked for, and the cache."""
    models, settings = figures["models"], figures["settings"]
    tokens = (f"{multiple * settings['window']:,}" for multiple in settings["multiples"])
    heads = [f"needles of {settings['samples']} in {each} tokens, 95 %" for each in tokens]
    found = (f"recall[recall_needle][{multiple}x]" for multiple in settings["multiples"])
    right = [f"{{{at}[right]}} ({{{at}[interval][0]:.0%}} to {{{at}[interval][1]:.0%}})" for at in found]
    losses, lost = _losses(models)
    head = ["model", *heads, *losses, "cache at 4,096, MiB", "at 65,536"]
    return markdown_table(head, rows_of(models, *right, *lost, _cache(4096), _cache(65536)))


def kinds(figures: dict) -> str:
    """Answers about facts of many kinds with Wilson's intervals, loss where it was asked for, and the cache."""
    models = figures["models"]
    answers = {name: {int(n): each for n, each in found["answers"].items()} for name, found in models.items()}
    table, (losses, lost) = kinds_table(answers, by_kind=False), _losses(models)
    more = rows_of(models, *lost, _cache(65536))
    rows = [[*row, *beside] for row, (_, *beside) in zip(table.rows, more, strict=True)]
    return markdown_table([*table.columns, *losses, "cache at 65,536, MiB"], rows)


# of all others the function has the table's name
MADE_BY = dict.fromkeys(("upcycling_report", "upcycling_groups", "upcycling_long"), needles)
MADE_BY |= dict.fromkeys(("upcycling_kinds", "upcycling_gemma"), kinds)


def checkpoints() -> str:
    """Perplexities of the committed language models, by text and by length; last those of hidden tokens."""
    folders = sorted((ROOT / "checkpoints").glob("*/results.json"))
    found = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in folders}
    key = lambda name: ("perplexity_by_length" not in found[name], found[name]["novels_perplexity"])  # noqa: E731
    names = sorted(found, key=key)
    texts = {"novels": "novels", "tales": "tales", "textbooks": "textbooks", "books": "other books"}
    rows = [
        [
            f"[{name}]({name}/README.md)",
            f"{found[name]['parameters'] / 1e6:.2f} M",
            *(f"{found[name][f'{text}_perplexity']:.1f}" for text in texts),
        ]
        for name in names
    ]
    by_length = {name: found[name]["perplexity_by_length"] for name in names if "perplexity_by_length" in found[name]}
    head = [f"{int(length):,}" for length in by_length[names[0]]]
    longer = [[name, *(f"{value:.1f}" for value in values.values())] for name, values in by_length.items()]
    return (
        f"{markdown_table(['perplexity', 'parameters', *texts.values()], rows)}\n"
        f"{markdown_table(['perplexity on novels, tokens read at a time', *head], longer)}"
    )


def measured_on(figures: dict) -> str:
    """The machine, the versions and the commit, as far as the results tell them."""
    machine = figures["machine"]
    parts = [machine["processor"], f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"]
    parts += [machine[name] for name in ("instruction_set", "accelerator") if name in machine]
    versions = {"Python": "python", "torch": "torch", "transformers": "transformers"}
    parts += [f"{label} {machine[key]}" for label, key in versions.items() if machine.get(key)]
    return f"{', '.join(parts)}; commit {figures['commit']}"


def source(figures: dict) -> str:
    """A line below a table: the command, unless the page names it, machine and commit."""
    command = f"`{figures['command']}`: " if "command" in figures else ""
    return f"*{command}{measured_on(figures)}.*\n"


def table(name: str) -> str:
    """As Markdown, with the line of its source; what to run where nothing has been measured yet."""
    if name == "checkpoints":  # which has no file of its own
        return checkpoints()
    if not (RESULTS / f"{name}.json").is_file():
        return f"Not measured: `python benchmarks/{name}.py` does it.\n"
    figures = load(name)
    make = MADE_BY.get(name) or getattr(speed, name)
    content = {key: value for key, value in figures.items() if key not in PROVENANCE}
    return f"{make(content)}\n{source(figures)}"


def rendered(text: str) -> str:
    """The document with every table made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", text)


def main() -> None:
    pages = (ROOT / "README.md", ROOT / "checkpoints" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for path in pages:
        text = path.read_text(encoding="utf-8")
        if rendered(text) != text:
            path.write_text(rendered(text), encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
