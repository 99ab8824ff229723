"""The tables of long_context.py: time and memory by length, and from where on a student is ahead of llama.cpp."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.table_text import markdown_table

TEACHER, LLAMA_CPP = "teacher", "llama.cpp"
LABELS = {
    TEACHER: "the teacher",
    "bst-256": "BST, windows of 256",
    "bst-512": "BST, windows of 512",
    "longhorn": "Longhorn, six full layers",
    "windows": "Windows of 256, six full layers",
    "windows-alone": "Windows of 256 alone",
    "groups": "Windows of 256, nine full groups",
    LLAMA_CPP: "llama.cpp",
}
PICTURE = "![milliseconds a token and seconds a prompt, by length](../benchmarks/results/long_context.png)"
MEBIBYTE = 2**20
Figure = dict[str, Any]


def rows_of(figures: Figure, kind: str) -> Iterator[tuple[str, str, dict[str, Figure]]]:
    """Model, form, and what was found by length."""
    for model, forms in figures["cells"].items():
        for form, kinds in forms.items():
            if kind in kinds:
                yield model, form, kinds[kind]


def label(figures: Figure, model: str, form: str) -> str:
    """As pages name it: for llama.cpp the kind of file that was given."""
    if model == LLAMA_CPP and form == "as given":
        form = file_type(figures)
    return f"{LABELS[model]}, {form}"


def file_type(figures: Figure) -> str:
    """Of the GGUF file that was given, as llama.cpp names it last ("llama 134.52M Q4_1")."""
    return (figures["llama_cpp"] or {"model": "as given"})["model"].split(" - ")[0].split()[-1]


def lengths(figures: Figure, kind: str) -> list[str]:
    found = {length for *_, cells in rows_of(figures, kind) for length in cells}
    return sorted(found, key=int)


def by_length(figures: Figure, kind: str, head: str, show: Callable[[Figure], str]) -> str:
    columns = lengths(figures, kind)
    rows = [
        [label(figures, model, form), *(show(cells[each]) if each in cells else "" for each in columns)]
        for model, form, cells in rows_of(figures, kind)
    ]
    return markdown_table([head, *(f"{int(each):,}" for each in columns)], rows)


def milliseconds(figures: Figure) -> dict[tuple[str, str], dict[int, float]]:
    """Model and form → tokens before → milliseconds a token."""
    return {
        (model, form): {int(length): found["milliseconds_per_token"] for length, found in cells.items()}
        for model, form, cells in rows_of(figures, "write")
    }


def ahead_from(ours: dict[int, float], theirs: dict[int, float]) -> int | None:
    """The shortest measured length from which on `ours` is less at all that both have; None if it is never."""
    first = None
    for length in sorted(ours.keys() & theirs.keys(), reverse=True):
        if ours[length] >= theirs[length]:
            break
        first = length
    return first


def against_llama_cpp(figures: Figure) -> list[str]:
    """A line for each form of llama.cpp: how far ahead it is at first, and from which length on students are."""
    found = milliseconds(figures)
    students = {pair: times for pair, times in found.items() if pair[0] not in (TEACHER, LLAMA_CPP)}
    lines = []
    for pair, theirs in found.items():
        both = [times for times in students.values() if times.keys() & theirs.keys()]
        if pair[0] != LLAMA_CPP or not both:
            continue
        shortest = min(length for times in both for length in times.keys() & theirs.keys())
        ratio = min(times[shortest] for times in both if shortest in times) / theirs[shortest]
        far = f"{ratio:.1f} times as fast as" if ratio > 1 else f"behind, {1 / ratio:.1f} times the time of"
        text = f"- {label(figures, *pair)}, at {shortest:,} tokens: {far} the fastest student. "
        starts: dict[int | None, list[str]] = {}
        for student, times in students.items():
            if times.keys() & theirs.keys():
                starts.setdefault(ahead_from(times, theirs), []).append(label(figures, *student))
        never = starts.pop(None, [])
        parts = [f"from {start:,} tokens on {'; '.join(names)}" for start, names in sorted(starts.items())]
        text += f"Ahead of it {', '.join(parts) or 'is no student at any length measured'}"
        text += f"; at none {'; '.join(never)}." if never and parts else "."
        lines.append(text)
    return lines


def against_teacher(figures: Figure) -> list[str]:
    """How many times as fast as the teacher the students are, at the longest length that both have."""
    found, lines = milliseconds(figures), []
    for form in dict.fromkeys(form for model, form in found if model == TEACHER):
        teacher = found[TEACHER, form]
        ratios: dict[int, list[str]] = {}
        for (model, of), times in found.items():
            if of == form and model not in (TEACHER, LLAMA_CPP) and (both := times.keys() & teacher.keys()):
                longest = max(both)
                ratios.setdefault(longest, []).append(f"{LABELS[model]} {teacher[longest] / times[longest]:.1f}x")
        lines += [
            f"- {form}, at {longest:,} tokens, times as fast as the teacher in transformers: {', '.join(each)}."
            for longest, each in ratios.items()
        ]
    return lines


def notes(figures: Figure) -> list[str]:
    shape, found = figures["teacher"], figures["llama_cpp"]
    text = (
        f"{shape['name']}: {shape['num_hidden_layers']} layers of width {shape['hidden_size']}, vocabulary "
        f"{shape['vocab_size']:,}. The teacher ends at {shape['max_position_embeddings']:,} positions: beyond it "
        "runs, and only its times mean something. 8 and 4 bits are `LowBitConfig` over bfloat16."
    )
    if found:
        text += f" llama.cpp is that of llama-cpp-python {found['version']}, with its defaults."
    return [text, *(f"Not measured: {name}, because {why}" for name, why in figures["skipped"].items())]


def long_context_groups(figures: Figure) -> str:
    """Times of a token alone."""
    return by_length(
        figures, "write", "ms a token after so many", lambda cell: f"{cell['milliseconds_per_token']:.1f}"
    )


def long_context_longest(figures: Figure) -> str:
    """Times of a token and memory at 65,536 tokens, and times of a prompt of 16,384, where they were taken."""
    parts = [long_context_groups(figures)]
    parts.append(by_length(figures, "write", "resident memory (of it the cache), MiB", memory))
    if lengths(figures, "read"):
        parts.append(by_length(figures, "read", "read, seconds (tokens a second)", prompt))
    return "\n".join(parts)


def long_context(figures: Figure) -> str:
    parts = [PICTURE + "\n"]
    tables = {
        "write": ("written, ms a token after so many", lambda cell: f"{cell['milliseconds_per_token']:.1f}"),
        "read": ("read, seconds (tokens a second)", prompt),
    }
    for kind, (head, show) in tables.items():
        if lengths(figures, kind):
            parts.append(by_length(figures, kind, head, show))
        if kind == "write" and (said := [*against_llama_cpp(figures), *against_teacher(figures)]):
            parts.append("\n".join(said) + "\n")
    if lengths(figures, "write"):
        parts.append(by_length(figures, "write", "resident memory (of it the cache), MiB", memory))
    return "\n".join([*parts, "\n".join(notes(figures)) + "\n"])


def prompt(cell: Figure) -> str:
    return f"{cell['seconds']:.1f} ({cell['tokens_per_second']:,.0f})"


def memory(cell: Figure) -> str:
    return f"{cell['resident_bytes'] / MEBIBYTE:,.0f} ({cell['cache_bytes'] / MEBIBYTE:,.1f})"
