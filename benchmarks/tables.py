"""Writes the tables of README.md and docs/ from the results, between `<!-- table: NAME -->` and `<!-- end -->`."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown_table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def longhorn_training(figures: dict) -> str:
    step, speed = figures["training_step"], figures["training_step"]["tokens_per_second"]
    times = step["longhorn_native_times_as_fast"]
    names = {
        "longhorn native": "Longhorn, C kernel (default)",
        "longhorn torch": "Longhorn, plain torch",
        "mamba compiled, associative scan": "Mamba of transformers, `torch.compile`, associative scan",
        "mamba eager": "Mamba of transformers, eager",
        "llama": "Llama of transformers",
    }
    rows = [[label, f"{speed[name]:,}", f"{times[name]:.1f}x"] for name, label in names.items()]
    table = markdown_table(["training step, L = 512", "tokens / s", "Longhorn is faster by"], rows)
    memory = figures["peak_megabytes_of_a_step"]
    memory_text = "; ".join(
        f"at L = {length}, {peak['longhorn']:.0f} MB (Llama {peak['llama']:.0f} MB)" for length, peak in memory.items()
    )
    exponent = figures["by_length"]["longhorn native"]["exponent"]
    longest = list(figures["by_length"]["longhorn native"]["seconds"])[-1]
    return f"{table}\nTime grows as L^{exponent:.2f} up to L = {longest}. Peak memory of a step: {memory_text}.\n"


TABLES = {"longhorn_training": longhorn_training}


def rendered(text: str) -> str:
    """The document with every table made anew."""

    def table(match: re.Match) -> str:
        figures = json.loads((RESULTS / f"{match[2]}.json").read_text(encoding="utf-8"))
        source = (
            f"*`{figures['command']}`: {figures['machine']['processor']}, {figures['machine']['threads']} threads.*"
        )
        return f"{match[1]}{TABLES[match[2]](figures)}\n{source}\n{match[3]}"

    return BLOCK.sub(table, text)


def main() -> None:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if rendered(text) != text:
            path.write_text(rendered(text), encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
