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


def local_attention(figures: dict) -> str:
    masked = figures["times_as_fast_as_masked_full_attention"]
    longt5 = figures["times_as_fast_as_longt5_local_attention_two_sided"]
    rows = [[f"all keys under a mask, L = {length}", f"{ratio:.1f}x"] for length, ratio in masked.items()]
    rows += [[f"local attention of LongT5, L = {length}", f"{ratio:.1f}x"] for length, ratio in longt5.items()]
    table = markdown_table(["forward and backward against", "window attention is faster by"], rows)
    return f"{table}\nTime grows as L^{figures['exponent']:.2f} up to L = {list(figures['seconds'])[-1]}.\n"


def decoding(figures: dict) -> str:
    shape = figures["shape"]
    rows = [[name, f"{value:.1f}"] for name, value in figures["milliseconds_per_token"].items()]
    head = f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']}, one row"
    share = figures["share_of_the_matrix_product_limit"]
    return (
        f"{markdown_table([head, 'ms / token'], rows)}\nLonghorn decodes at {share:.0%} of the bare products' speed.\n"
    )


def lmu_isa(figures: dict) -> str:
    step, rows = figures["training_step_at_1024"], figures["training_step_of_one_row"]
    lines = [
        [f"{name} form, {step['batch']} rows of 1024", f"{speed:,}", f"{step['peak_megabytes'][name]:,.0f}"]
        for name, speed in step["tokens_per_second"].items()
    ]
    table = markdown_table(["training step, the 1M row of table 3", "tokens / s", "peak MB"], lines)
    ratios = ", ".join(f"{ratio}x at {length}" for length, ratio in rows["lmu_isa_times_as_fast_as_gpt2"].items())
    return (
        f"{table}\nTime grows as L^{rows['exponent']:.2f}. Speed relative to a GPT-2 of transformers of the same "
        f"width: {ratios}.\n"
    )


TABLES = {
    "longhorn_training": longhorn_training,
    "local_attention": local_attention,
    "decoding": decoding,
    "lmu_isa": lmu_isa,
}


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
