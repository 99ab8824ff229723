"""Tables of time and memory, each from the figures of one file of results."""

import math
from collections.abc import Callable
from typing import Any

from benchmarks.table_text import RESULTS, load, markdown_table, mebibytes, rows_of

Figures = dict[str, Any]
CONTEXT_MODELS = {
    "teacher": "the teacher",
    "bst-256": "BST, windows of 256",
    "bst-512": "BST, windows of 512",
    "longhorn": "Longhorn, six full layers",
    "windows": "Windows of 256, six full layers",
    "windows-alone": "Windows of 256 alone",
    "groups": "Windows of 256, nine full groups",
    "llama.cpp": "llama.cpp",
}


def _size(shape: Figures, longhorn: str = "") -> str:
    """`timing.models` gives Longhorn twice the layers of the same width, and so as many weights."""
    depth, width, words = (shape[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    return f"{depth} layers of width {width}{longhorn.format(2 * depth)}, vocabulary {words:,}"


def _transformer_size(shape: Figures) -> str:
    return _size(shape, " (Longhorn {})")


def training(figures: Figures) -> str:
    step, longer = figures["against_llama"], figures["context_states"]
    ratios, parts = {"Llama": 1.0} | step["times_as_fast_as_llama"], step["parts"]
    rows = [
        [name, f"{speed:,}", f"{ratios[name]:.2f}x", *_parts(parts[name], parts["Llama"]["products_gflop"])]
        for name, speed in step["tokens_per_second"].items()
    ]
    head = [f"{_transformer_size(figures['shape'])}; training step, L = {step['length']}", "tokens / s"]
    head += [
        "times as fast as Llama",
        "products, Llama's over its own",
        "time in products, %",
        "in attention or scan, %",
    ]
    return (
        f"{markdown_table(head, rows)}\nWith {longer['num_hidden_layers']} "
        f"layers and {longer['length']:,} tokens BST SH takes {longer['sh_time_over_sliding']:.2f}x the time of the "
        "same stack without context states.\n"
    )


def _parts(found: Figures, of_llama: float) -> list[str]:
    shares = (f"{100 * found[name]:.0f}" for name in ("share_of_products", "share_along_rows"))
    return [f"{of_llama / found['products_gflop']:.2f}", *shares]


def local_attention(figures: Figures) -> str:
    against = {
        "all keys under a mask": ("masked_full_attention", 1),
        "local attention of LongT5": ("longt5_local_attention_two_sided", 1),
        "the same, projections on both sides": ("longt5_local_attention_two_sided_with_projections", 2),
    }
    rows = [
        [f"{label}, L = {length}", f"{ratio:.{digits}f}x"]
        for label, (key, digits) in against.items()
        for length, ratio in figures[f"times_as_fast_as_{key}"].items()
    ]
    table = markdown_table(["forward and backward against", "window attention is faster by"], rows)
    return f"{table}\nTime grows as L^{figures['exponent']:.2f} up to L = {list(figures['seconds'])[-1]}.\n"


def decoding(figures: Figures) -> str:
    families, limited = figures["families"], figures["weights_limit"]
    deep = "{num_hidden_layers} layers of width {hidden_size}"
    rows: list[list[str]] = [[name, f"{value:.1f}"] for name, value in figures["milliseconds_per_token"].items()]
    table = markdown_table([f"{deep.format(**figures['shape'])} (Longhorn too), one sequence", "ms / token"], rows)
    ratios = families["time_over_llama"]
    rows = [[name, f"{ms:.1f}", f"{ratios[name]:.2f}x"] for name, ms in families["milliseconds_per_token"].items()]
    head = [f"{_transformer_size(families['shape'])}; one sequence", "ms / token", "time over Llama"]
    return (
        f"{table}\nLonghorn decodes at {figures['share_of_the_matrix_product_limit']:.0%} of the bare products' "
        "speed.\n\n"
        f"{markdown_table(head, rows)}\nShare of the matmul-only speed ({deep.format(**limited['shape'])}, Longhorn "
        f"too): {', '.join(f'{name} {value:.0%}' for name, value in limited['share'].items())}.\n"
    )


def longhorn_scan(figures: Figures) -> str:
    forward, both, shape = figures["forward"], figures["forward_and_backward"], figures["shape"]
    rows = [[name, f"{value:.1f}"] for name, value in forward["milliseconds"].items()]
    rows.append(["Mamba of transformers, a layer's forward", f"{figures['mamba_layer_forward_milliseconds']:.0f}"])
    head = "scan forward, width {width}, state {state}, L = {length}".format(**shape)
    return (
        f"{markdown_table([head, 'ms'], rows)}\nThe C kernel takes {forward['C_times_the_copy']:.1f}x the time of "
        f"copying the bytes it must move, {forward['C_times_as_fast_as_torch']:.0f}x less than torch; with its "
        f"backward {both['C_times_as_fast_as_torch']:.0f}x less. Forward and backward of the scan are "
        f"{figures['share_of_the_block']['share']:.0%} of a layer's.\n"
    )


def weight_only(figures: Figures) -> str:
    """Milliseconds and, of what is below bfloat16, the share of its time; below, the loss that rounding costs."""
    times = figures["milliseconds_per_token"]
    forms = list(next(iter(times.values())))
    few_bits = forms[2:]
    rows = [
        [name, *(f"{found[f]:.1f}" for f in forms), *(f"{found[f] / found['bfloat16']:.2f}" for f in few_bits)]
        for name, found in times.items()
    ]
    head = [f"{_transformer_size(figures['shape'])}; ms / token", *forms, *(f"{f} over bfloat16" for f in few_bits)]
    lost = [
        [name, f"{found['float32']:.3f}", *(f"{found[form] - found['float32']:+.4f}" for form in forms[1:])]
        for name, found in figures["loss"].items()
    ]
    return f"{markdown_table(head, rows)}\n{markdown_table(['held-out loss, nats per token', *forms], lost)}"


def compiled_decoding(figures: Figures) -> str:
    """Of a student: a token in each form; the loss; and the attention of one token beside reading what it reads."""
    rows = []
    for name, found in figures["tokens"].items():
        times, first = found["milliseconds_per_token"], found["seconds_of_first_tokens"]
        for way in next(iter(times.values())):
            row = [f"{name}: {way}", *(f"{by_way[way]:.1f}" for by_way in times.values())]
            seconds = first if isinstance(first, list) else [first]
            rows.append([*row, " / ".join(f"{value:.0f}" for value in seconds) if way == "compiled" else ""])
    lengths = next(iter(figures["tokens"].values()))["milliseconds_per_token"]
    head = ["ms a token, after so many", *(f"{int(length):,}" for length in lengths)]
    tokens = markdown_table([*head, "s of the first, where nothing is compiled / found on disk"], rows)
    ratio = lambda found: f"{found['attention'] / found['reading']:.1f}"  # noqa: E731
    steps = rows_of(figures["attention"], "{bytes:,}", "{attention:,.0f}", "{reading:,.0f}", ratio)
    step = markdown_table(["attention of one token: slots, dtype", "bytes", "us", "us to read them", "ratio"], steps)
    products = rows_of(figures["head"], "{native:,.0f}", "{torch:,.0f}", "{reading:,.0f}")
    ways = ["us of this package", "of torch", "to read the codes"]
    head = markdown_table(["one row times SmolLM2-135M's head in 8 bits: dtype of the row", *ways], products)
    return "\n".join([tokens, _compiled_families(figures["families"]), step, head, _rounded(figures)])


def _compiled_families(families: Figures) -> str:
    rows = [
        [name, *(f"{found[way]:.1f}" for way in ("eager", "compiled", "products")),
         f"{found['compiled'] / found['eager']:.2f}", f"{found['compiled'] / found['products']:.2f}"]
        for name, found in families.items()
    ]  # fmt: skip
    head = ["ms a token, 24 layers of width 1,024 (Longhorn 48)", "eager", "compiled", "products alone"]
    return markdown_table([*head, "compiled over eager", "over products"], rows)


def _rounded(figures: Figures) -> str:
    """What rounding costs: loss beside float32's, and answers."""
    rows, forms = [], list(next(iter(figures["needles"].values())))[3:]
    for name, found in figures["loss"].items():
        beside = [f"{found[form] - found['float32']:+.4f}" if form in found else "" for form in forms[1:]]
        rows.append([f"loss of {name}, nats a token", f"{found['float32']:.3f}", *beside])
    for name, found in figures["needles"].items():
        label = f"answers of {name}, of {found['asked']} in {found['tokens']:,} tokens"
        rows.append([label, *(str(found[form]) for form in forms)])
    return markdown_table(["weights of", *forms], rows)


def assisted_decoding(figures: Figures) -> str:
    """Of each target by the number of drafted tokens."""
    targets = figures["targets"]
    counts = [key for key in next(iter(targets.values())) if key != "commit"]
    rows = [[name, *(f"{found[n][0]:.1f} ({found[n][1]:.1f})" for n in counts)] for name, found in targets.items()]
    return markdown_table(["drafts for", *(f"{n} drafted" for n in counts)], rows)


# -- long texts -------------------------------------------------------------------------------------------------------


def by_kind(figures: Figures, kind: str) -> dict[str, dict[str, Figures]]:
    """Of what was written or read: the name of model and form on pages → tokens → what was found."""
    given = (figures["llama_cpp"] or {"model": "as given"})["model"].split(" - ")[0].split()[-1]  # "llama 135M Q4_1"
    return {
        f"{CONTEXT_MODELS[model]}, {given if form == 'as given' else form}": kinds[kind]
        for model, forms in figures["cells"].items()
        for form, kinds in forms.items()
        if kind in kinds
    }


def _by_length(figures: Figures, kind: str, head: str, show: Callable[[Figures], str]) -> str:
    found = by_kind(figures, kind)
    lengths = sorted({length for cells in found.values() for length in cells}, key=int)
    rows = [[label, *(show(cells[n]) if n in cells else "" for n in lengths)] for label, cells in found.items()]
    return markdown_table([head, *(f"{int(length):,}" for length in lengths)], rows) if found else ""


def long_context_groups(figures: Figures) -> str:
    """Times of a token alone."""
    head = "written, ms a token after so many"
    return _by_length(figures, "write", head, lambda cell: f"{cell['milliseconds_per_token']:.1f}")


def long_context_longest(figures: Figures) -> str:
    """Times of a token and of a prompt, and memory, of what was measured."""
    read = _by_length(
        figures,
        "read",
        "read, seconds (tokens a second)",
        lambda cell: f"{cell['seconds']:.1f} ({cell['tokens_per_second']:,.0f})",
    )
    memory = _by_length(
        figures,
        "write",
        "resident memory (of it the cache), MiB",
        lambda cell: f"{mebibytes(cell['resident_bytes'])} ({mebibytes(cell['cache_bytes'], 1)})",
    )
    return "\n".join(part for part in (long_context_groups(figures), read, memory) if part)


def long_context(figures: Figures) -> str:
    """With the picture, and what the models are."""
    shape, program = figures["teacher"], figures["llama_cpp"]
    notes = [
        f"{shape['name']}: {_size(shape)}. The teacher ends at {shape['max_position_embeddings']:,} positions: "
        "beyond it runs, and only its times mean something. 8 and 4 bits are `LowBitConfig` over bfloat16."
        + (f" llama.cpp is that of llama-cpp-python {program['version']}, with its defaults." if program else ""),
        *(f"Not measured: {name}, because {why}" for name, why in figures["skipped"].items()),
    ]
    picture = "![milliseconds a token and seconds a prompt, by length](../benchmarks/results/long_context.png)"
    return "\n".join([f"{picture}\n", long_context_longest(figures), "\n".join(notes) + "\n"])


def long_decoding(figures: Figures) -> str:
    """The largest difference of logits to float64 at each mark, of the variants that have come so far, and memory."""
    models = figures["models"]
    marks = sorted({mark for found in models.values() for mark in found["errors"]}, key=int)

    def error(mark: str) -> Callable[[Figures], str]:
        return lambda found: f"{found['errors'][mark]:.1e}" if mark in found["errors"] else ""

    def memory(found: Figures) -> str:
        megabytes = list(found["megabytes"].values())
        return f"{megabytes[0]:,.0f} to {megabytes[-1]:,.0f}"

    head = ["largest difference of logits, over the largest logit, after so many tokens"]
    head += [f"{int(mark):,}" for mark in marks]
    return markdown_table([*head, "resident MB, first to last"], rows_of(models, *map(error, marks), memory))


def long_serving(figures: Figures) -> str:
    """Memory of the server by requests; below it what became of its answers and of the folder."""
    server, folder = figures["server"], figures["folder"]
    head = ["of the server, after so many requests", *(f"{int(mark):,}" for mark in server["megabytes"])]
    table = markdown_table(head, [["resident MB", *(f"{value:.0f}" for value in server["megabytes"].values())]])
    lost = f"{server['other_answers']} of {server['repeated']} repeated requests"
    held = f"{folder['most_bytes']:,} bytes in {folder['most_files']} files"
    return (
        f"{table}\nAnswered otherwise than at first: {lost}. The folder held at most {held}, of "
        f"{figures['settings']['folder_bytes']:,} allowed, over {figures['settings']['texts']:,} texts; after "
        f"{folder['went_on']} of {folder['restarts']} restarts the next text went on from a file; "
        f"{folder['other_answers']} other answers, {folder['foreign_lost']} files of others lost.\n"
    )


def long_training(figures: Figures) -> str:
    """After how many tokens half of a state is left, as the parameters have it and as the state shows it."""
    modes = figures["modes"]
    marks = list(next(iter(modes.values())))

    def half(decay: float) -> str:
        return f"{math.log(0.5) / math.log(decay):,.1f}"

    def cell(mark: str) -> Callable[[Figures], str]:
        return lambda of: f"{half(of[mark]['parameters'])} / {half(of[mark]['state'])}" if mark in of else ""

    head = ["half-life in tokens, by parameters / by the state, after so many steps"]
    return markdown_table([*head, *(f"{int(mark):,}" for mark in marks)], rows_of(modes, *map(cell, marks)))


def comparison(figures: Figures) -> str:
    """Of each model how many checks have which outcome; of each check where it is refused and where it differs."""
    models, checks = figures["models"], list(next(iter(figures["models"].values()))["checks"])
    outcomes = {name: {c: found["checks"][c]["outcome"] for c in checks} for name, found in models.items()}
    rows = [
        [n, *(list(o.values()).count(kind) for kind in ("same", "refused", "differs"))] for n, o in outcomes.items()
    ]
    by_model = markdown_table([f"of {len(checks)} checks", "same", "refused", "differs, without a word"], rows)
    others = [name for name in models if name not in figures["ours"]]
    lines = [
        [check, *(_who([n for n in models if outcomes[n][check] == kind], others) for kind in ("refused", "differs"))]
        for check in checks
    ]
    by_check = markdown_table(["check", "refused by", "differs for"], lines).replace("---:", "---")
    return f"{by_model}\n{by_check}"


def _who(names: list[str], everyone: list[str]) -> str:
    """Names of models, or the shorter list of those that are missing among everyone."""
    missing = [name for name in everyone if name not in names]
    if not set(names) <= set(everyone) or len(missing) >= len(names):
        return ", ".join(names) or "none"
    return "all others but " + ", ".join(missing) if missing else "all others"


def _difference(found: Figures) -> str:
    """With its interval, if there is more than one seed."""
    half = found["half_width_of_95_percent"]
    return f"{found['mean']:+.2f}" + ("" if half is None else f" ± {half:.2f}")


def _calls(models: Figures) -> str:
    """Which call measured which models; those of earlier calls have no command where none was kept."""
    names: dict[tuple[str | None, str], list[str]] = {}
    for name, found in models.items():
        names.setdefault((found["command"], found["commit"]), []).append(name)
    said = [
        f"by {f'`{command}`' if command else 'calls that were not recorded'} ({commit}): {', '.join(each)}"
        for (command, commit), each in names.items()
    ]
    return f"Measured {'; '.join(said)}.\n"


def choosing(figures: Figures) -> str:
    """Of each model what it recalls, its loss, what it costs, what it keeps, and how many checks it passes; what was
    not measured is empty. Below it, which call measured what."""
    recalls = [load(name)["best"] for name in ("mqar_families", "mqar_peers") if (RESULTS / f"{name}.json").is_file()]
    recalled = {found["model"]: found["accuracy_by_pairs"] for best in recalls for found in best}
    recalled["Qwen3-Next"] = recalled["Gated DeltaNet"]  # its recurrent layers, which alone were asked
    compared = ("mamba2_books", "peers_books", "families_books")
    differences = {name: found for file in compared for name, found in load(file)["differences"].items()}
    checked = load("comparison")["models"]
    rows = []
    for name, found in figures["models"].items():
        known = name.removesuffix(" SH")  # elsewhere it is BST, which has no other there
        loss, checks = differences.get(known), list(checked.get(known, {"checks": {}})["checks"].values())
        rows.append(
            [
                name,
                *(f"{100 * recalled[known][pairs]:.0f}" if known in recalled else "" for pairs in ("8", "16", "32")),
                _difference(loss) if loss else "",
                f"{found['trained_tokens_per_second']:,.0f}",
                f"{found['read_tokens_per_second']:,.0f}",
                f"{found['milliseconds_per_token']:.1f}",
                mebibytes(found["kept_bytes"], 1),
                sum(check["outcome"] == "same" for check in checks) if checks else "",
            ]
        )
    head = ["model", *(f"of {pairs} pairs, %" for pairs in (8, 16, 32)), "loss minus Llama's, 95 %"]
    head += ["trained, tokens/s", "read, tokens/s", "written, ms/token"]
    head += [f"kept after {figures['settings']['far']:,} tokens, MiB", "of 15 checks"]
    return f"{markdown_table(head, rows)}\n{_calls(figures['models'])}"
