"""Writes the tables of README.md and docs/ from the results, between `<!-- table: NAME -->` and `<!-- end -->`."""

import json
import math
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from experiment_tables import (
    ALSO,
    arena,
    compared,
    first_token,
    glue,
    glue_apart,
    kv_groups,
    lengths,
    lm_eval,
    rare_words,
    rates_tried,
    recall,
    recall_by_seed,
    scaling_law,
    scitldr,
    settings_apart,
    upcycling_controls,
    upcycling_gaps,
    upcycling_grid,
    upcycling_kinds,
    upcycling_losses,
    upcycling_memory,
    upcycling_recall,
    upcycling_report,
    upcycling_teacher,
)
from table_text import RESULTS, load, markdown_table

from benchmarks.long_context_table import long_context, long_context_groups, long_context_longest

ROOT = Path(__file__).parents[1]
WITH_HEAD = "training_step_of_one_row_of_1024_with_the_head"
SPEED = "thousand_tokens_per_second"
GROWTH_FROM = 4096  # tokens; shorter rows measure the start of a step, not its length
PROVENANCE = {"command", "machine", "commit"}
LONGHORN_AND_PEERS = {
    "longhorn native": "Longhorn, C kernel (default)",
    "longhorn torch": "Longhorn, plain torch",
    "mamba compiled, associative scan": "Mamba of transformers, `torch.compile`, associative scan",
    "mamba eager": "Mamba of transformers, eager",
    "llama": "Llama of transformers",
}
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def longhorn_training(figures: dict) -> str:
    step, speed = figures["training_step"], figures["training_step"]["tokens_per_second"]
    times = step["longhorn_native_times_as_fast"]
    rows = [[label, f"{speed[name]:,}", f"{times[name]:.1f}x"] for name, label in LONGHORN_AND_PEERS.items()]
    table = markdown_table([f"{sizes(figures)}; training step, L = 512", "tokens / s", "Longhorn is faster by"], rows)
    memory = figures["peak_megabytes_of_a_step"]
    memory_text = "; ".join(
        f"at L = {length}, {peak['longhorn']:.0f} MB (Llama {peak['llama']:.0f} MB)" for length, peak in memory.items()
    )
    seconds = {int(length): value for length, value in figures["by_length"]["longhorn native"]["seconds"].items()}
    return (
        f"{table}\nFrom L = {GROWTH_FROM:,} to {max(seconds):,} time grows as L^{growth(seconds):.2f}; below, what a "
        f"step costs at any length weighs more. Peak memory of a step: {memory_text}.\n"
    )


def of_transformer_size(shape: dict) -> str:
    """`timing.models` gives Longhorn twice the layers of the same width, and so as many weights."""
    depth, width, words = (shape[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    return f"{depth} layers of width {width} (Longhorn {2 * depth}), vocabulary {words:,}"


def sizes(figures: dict) -> str:
    shape = figures["shape"]
    layers, width, words = (shape[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    return f"{layers} layers of width {width}, vocabulary {words:,}"


def growth(seconds: dict[int, float]) -> float:
    """The exponent of growth between `GROWTH_FROM` and the longest length, least squares in logarithms."""
    points = [(math.log(length), math.log(value)) for length, value in seconds.items() if length >= GROWTH_FROM]
    slope, _ = statistics.linear_regression(*zip(*points))
    return slope


def local_attention(figures: dict) -> str:
    masked = figures["times_as_fast_as_masked_full_attention"]
    longt5 = figures["times_as_fast_as_longt5_local_attention_two_sided"]
    rows = [[f"all keys under a mask, L = {length}", f"{ratio:.1f}x"] for length, ratio in masked.items()]
    rows += [[f"local attention of LongT5, L = {length}", f"{ratio:.1f}x"] for length, ratio in longt5.items()]
    whole = figures["times_as_fast_as_longt5_local_attention_two_sided_with_projections"]
    rows += [
        [f"the same, projections on both sides, L = {length}", f"{ratio:.2f}x"] for length, ratio in whole.items()
    ]
    table = markdown_table(["forward and backward against", "window attention is faster by"], rows)
    return f"{table}\nTime grows as L^{figures['exponent']:.2f} up to L = {list(figures['seconds'])[-1]}.\n"


def long_conv_counts(figures: dict) -> str:
    rows = []
    for length, row in figures["by_length"].items():
        costs = [
            f"{row[form]['flops']:,} / {row[form]['bytes']} / {row[form]['picoseconds']}" for form in figures["forms"]
        ]
        rows.append([f"{int(length):,}", *costs, row["choice"]["float32"], row["choice"]["bfloat16"]])
    head = ["taps", *figures["forms"], "choice, float32", "choice, bfloat16"]
    return markdown_table(head, rows)


def decoding(figures: dict) -> str:
    shape = figures["shape"]
    rows = [[name, f"{value:.1f}"] for name, value in figures["milliseconds_per_token"].items()]
    head = f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']} (Longhorn too), one sequence"
    share = figures["share_of_the_matrix_product_limit"]
    text = (
        f"{markdown_table([head, 'ms / token'], rows)}\nLonghorn decodes at {share:.0%} of the bare products' speed.\n"
    )
    if "families" not in figures:
        return text
    families = figures["families"]
    small = f"{of_transformer_size(families['shape'])}; one sequence"
    over = [
        [name, f"{value:.1f}", f"{families['time_over_llama'][name]:.2f}x"]
        for name, value in families["milliseconds_per_token"].items()
    ]
    limited = figures["weights_limit"]
    limit = ", ".join(f"{name} {value:.0%}" for name, value in limited["share"].items())
    large = f"{limited['shape']['num_hidden_layers']} layers of width {limited['shape']['hidden_size']}, Longhorn too"
    return (
        f"{text}\n{markdown_table([small, 'ms / token', 'time over Llama'], over)}\nShare of the "
        f"matmul-only speed ({large}): {limit}.\n"
    )


def lmu_isa(figures: dict) -> str:
    step, rows = figures["training_step_at_1024"], figures["training_step_of_one_row"]
    lines = [
        [f"{name} form, {step['batch']} sequences of 1024", f"{speed:,}", f"{step['peak_megabytes'][name]:,.0f}"]
        for name, speed in step["tokens_per_second"].items()
    ]
    table = markdown_table(["training step, the 1M row of table 3", "tokens / s", "peak MB"], lines)
    ratios = ", ".join(f"{ratio}x at {length}" for length, ratio in rows["lmu_isa_times_as_fast_as_gpt2"].items())
    return (
        f"{table}\nTime grows as L^{rows['exponent']:.2f}. Speed relative to a GPT-2 of transformers of the same "
        f"width: {ratios}; with heads of {figures[WITH_HEAD]['vocabulary']:,} words "
        f"{figures[WITH_HEAD]['lmu_isa_times_as_fast_as_gpt2']}x at 1024.\n"
    )


def longhorn_scan(figures: dict) -> str:
    forward, both, shape = figures["forward"], figures["forward_and_backward"], figures["shape"]
    rows = [[name, f"{value:.1f}"] for name, value in forward["milliseconds"].items()]
    rows.append(["Mamba of transformers, a layer's forward", f"{figures['mamba_layer_forward_milliseconds']:.0f}"])
    head = f"scan forward, width {shape['width']}, state {shape['state']}, L = {shape['length']}"
    return (
        f"{markdown_table([head, 'ms'], rows)}\nThe C kernel takes {forward['C_times_the_copy']:.1f}x the time of "
        f"copying the bytes it must move, {forward['C_times_as_fast_as_torch']:.0f}x less than torch; with its "
        f"backward {both['C_times_as_fast_as_torch']:.0f}x less. Forward and backward of the scan are "
        f"{figures['share_of_the_block']['share']:.0%} of a layer's.\n"
    )


def cpu_kernels(figures: dict) -> str:
    """Milliseconds of native and torch on each instruction set, forward and with backward."""
    levels, rows = figures["milliseconds"], []
    for name in figures["sizes"]:
        for kind in ("forward", "forward and backward"):
            row = [f"{name}, {kind}"]
            for found in levels.values():
                pair = None if found is None else found[name][kind]
                cells = ["not measured"] * 2 if pair is None else [f"{pair[b]:.1f}" for b in ("native", "torch")]
                row += cells
            rows.append(row)
    head = ["ms"] + [f"{level}, {backend}" for level in levels for backend in ("C", "torch")]
    sizes = "".join(f"- `{name}`: {text}\n" for name, text in figures["sizes"].items())
    return f"{markdown_table(head, rows)}\n{sizes}"


def bst_layer(figures: dict) -> str:
    kinds = figures["layer"]
    lengths = list(kinds["forward"]["thousand_tokens_per_second"])
    names = list(kinds["forward"]["exponent"])
    head = ["thousand tokens / s", *(f"{kind}, L = {n}" for kind in kinds for n in kinds[kind][SPEED])]
    rows = [[name, *(kinds[kind][SPEED][n][name] for kind in kinds for n in kinds[kind][SPEED])] for name in names]
    first = kinds["forward"]
    return (
        f"{markdown_table(head, rows)}\nAt L = {lengths[0]}, forward, SH is "
        f"{first[f'SH_times_as_fast_as_block_recurrent_at_{lengths[0]}']}x as fast as a Block-Recurrent layer and "
        f"takes {first[f'SH_times_the_time_of_sliding_attention_at_{lengths[0]}']}x the time of sliding attention, MF "
        f"{first[f'MF_times_the_time_of_SH_at_{lengths[0]}']}x that of SH. bst-80m reads "
        f"{figures['bst_80m']['prefill_tokens_per_second']} tokens/s and writes "
        f"{figures['bst_80m']['decoding_tokens_per_second']}.\n"
    )


def spade_ssm_cost(figures: dict) -> str:
    stacks = {"without": "window attention alone", "with": "with a frozen S4", "full attention": "full attention"}
    rows = [
        [
            f"{int(length):,}",
            *(f"{entry['seconds'][stack]:.2f} s, {entry['peak_megabytes'][stack]:,} MB" for stack in stacks),
            f"{entry['added_percent']:+} %",
        ]
        for length, entry in figures["training_step"].items()
    ]
    prefill = figures["prefill"]
    heads = ["four layers of width 768; training step, L", *stacks.values(), "S4 adds to the time"]
    table = markdown_table(heads, rows)
    return (
        f"{table}\nA prompt of {prefill['tokens']} tokens in pieces of {prefill['piece']} takes "
        f"{prefill['pieces_to_whole']}x the time of one piece.\n"
    )


def training(figures: dict) -> str:
    step, shape, sizes = figures["against_llama"], figures["shape"], figures["context_states"]
    rows = [
        [name, f"{speed:,}", f"{step['times_as_fast_as_llama'].get(name, 1.0):.2f}x"]
        for name, speed in step["tokens_per_second"].items()
    ]
    head = f"{of_transformer_size(shape)}; training step, L = {step['length']}"
    return (
        f"{markdown_table([head, 'tokens / s', 'times as fast as Llama'], rows)}\nWith {sizes['num_hidden_layers']} "
        f"layers and {sizes['length']:,} tokens BST SH takes {sizes['sh_time_over_sliding']:.2f}x the time of the "
        "same stack without context states.\n"
    )


def weight_only(figures: dict) -> str:
    """Milliseconds and, of what is below bfloat16, the share of its time; below, the loss where it was taken."""
    times = figures["milliseconds_per_token"]
    forms = list(next(iter(times.values())))
    few_bits = forms[2:]
    rows = [
        [
            name,
            *(f"{found[form]:.1f}" for form in forms),
            *(f"{found[form] / found['bfloat16']:.2f}" for form in few_bits),
        ]
        for name, found in times.items()
    ]
    heads = [*forms, *(f"{form} over bfloat16" for form in few_bits)]
    table = markdown_table([f"{of_transformer_size(figures['shape'])}; ms / token", *heads], rows)
    if not figures["loss"]:
        return table
    lost = [
        [name, f"{found['float32']:.3f}", *(f"{found[form] - found['float32']:+.4f}" for form in forms[1:])]
        for name, found in figures["loss"].items()
    ]
    return f"{table}\n{markdown_table(['held-out loss, nats per token', 'float32', *forms[1:]], lost)}"


def half_prompts(figures: dict) -> str:
    """Of every model and form: seconds, megabytes that the prompt takes, distance to float64."""
    rows = []
    for name, found in figures["models"].items():
        gain = found["bfloat16"]["seconds"] / found["products in float32"]["seconds"]
        cells = [f"{form['seconds']:.2f} / {form['megabytes']:,} / {form['error']:.1e}" for form in found.values()]
        rows.append([name, *cells, f"{gain:.1f}x"])
    forms = list(next(iter(figures["models"].values())))
    head = f"{of_transformer_size(figures['shape'])}; {figures['length']:,} tokens: s / MB / error of the logits"
    return markdown_table([head, *forms, "faster by"], rows)


def start_up(figures: dict) -> str:
    forwards = figures["first forward"]
    names = list(next(iter(forwards.values())))
    head = ["seconds of a forward", *(name.replace("first, nothing", "first, no kernel") for name in names)]
    table = markdown_table(head, [[name, *found.values()] for name, found in forwards.items()])
    notes = [f"{name} {found['seconds']} s" for name, found in figures["on top of torch and transformers"].items()]
    largest = figures["largest preset"]
    seconds = " and ".join(f"{which} {value} s" for which, value in largest["seconds"].items())
    loaded = f"{largest['preset']} ({largest['megabytes']:,} MB): {seconds}"
    return f"{table}\nOn top of torch and transformers: {', '.join(notes)}. {loaded}.\n"


def checkpoints() -> str:
    """Perplexities of the committed language models, by text and by length; last those of hidden tokens."""
    folders = sorted((ROOT / "checkpoints").glob("*/results.json"))
    found = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in folders}
    by_perplexity = sorted(
        found.items(), key=lambda pair: ("perplexity_by_length" not in pair[1], pair[1]["novels_perplexity"])
    )
    found = dict(by_perplexity)
    texts = ("novels", "tales", "textbooks", "books")
    rows = [
        [f"[{name}]({name}/README.md)", f"{results['parameters'] / 1e6:.2f} M",
         *(f"{results[f'{text}_perplexity']:.1f}" for text in texts)]
        for name, results in found.items()
    ]  # fmt: skip
    first = next(iter(found.values()))["perplexity_by_length"]
    head = ["perplexity on novels, tokens read at a time", *(f"{int(length):,}" for length in first)]
    by_length = [
        [name, *(f"{value:.1f}" for value in results["perplexity_by_length"].values())]
        for name, results in found.items()
        if "perplexity_by_length" in results
    ]
    names = ["perplexity", "parameters", "novels", "tales", "textbooks", "other books"]
    return f"{markdown_table(names, rows)}\n{markdown_table(head, by_length)}"


def who(names: list[str], everyone: list[str]) -> str:
    """Names of models, or the shorter list of those that are missing among everyone."""
    missing = [name for name in everyone if name not in names]
    if not set(names) <= set(everyone) or len(missing) >= len(names):
        return ", ".join(names) or "none"
    return "all others but " + ", ".join(missing) if missing else "all others"


def same_checks(figures: dict) -> str:
    """Of each model how many checks have which outcome; of each check where it is refused and where it differs."""
    models = figures["models"]
    rows = []
    for name, found in models.items():
        outcomes = [answer["outcome"] for answer in found["checks"].values()]
        rows.append([name, *(outcomes.count(kind) for kind in ("same", "refused", "differs"))])
    total = len(next(iter(models.values()))["checks"])
    by_model = markdown_table([f"of {total} checks", "same", "refused", "differs, without a word"], rows)
    others = [name for name in models if name not in figures["ours"]]
    lines = []
    for check in next(iter(models.values()))["checks"]:
        named: dict[str, list[str]] = {"refused": [], "differs": []}
        for name, found in models.items():
            if (outcome := found["checks"][check]["outcome"]) != "same":
                named[outcome].append(name)
        lines.append([check, *(who(names, others) for names in named.values())])
    by_check = markdown_table(["check", "refused by", "differs for"], lines).replace("---:", "---")
    return f"{by_model}\n{by_check}"


TABLES = {
    "bst_layer": bst_layer,
    "spade_ssm_cost": spade_ssm_cost,
    "spade_books": compared,
    "longhorn_tokens": compared,
    "lmu_isa_tokens": compared,
    "spade_layers": compared,
    "bst_layers": compared,
    "families_books": compared,
    "spade_scaled_8": compared,
    "spade_scaled_32": compared,
    "spade_scaled_128": compared,
    "longhorn_mamba_books": compared,
    "families_length": lengths,
    "checkpoints_length": lengths,
    "first_token_recall": first_token,
    "first_token_mixers": first_token,
    "first_token_noise": first_token,
    "rare_words": rare_words,
    "bst_settings_adamw": settings_apart,
    "bst_settings_adafactor": settings_apart,
    "bst_settings_rates": rates_tried,
    "upcycling_gaps": upcycling_gaps,
    "upcycling_controls": upcycling_controls,
    "upcycling_recall": upcycling_recall,
    "upcycling_report": upcycling_report,
    "upcycling_groups": upcycling_report,
    "upcycling_long": upcycling_report,
    "upcycling_kinds": upcycling_kinds,
    "upcycling_gemma": upcycling_kinds,
    "upcycling_sinks": upcycling_losses,
    "upcycling_teacher": upcycling_teacher,
    "upcycling_grid_128": upcycling_grid,
    "upcycling_grid_256": upcycling_grid,
    "upcycling_grid_512": upcycling_grid,
    "upcycling_memory": upcycling_memory,
    "upcycling_memory_mixers": upcycling_memory,
    "upcycling_positions": upcycling_losses,
    "bst_books": lengths,
    "bst_16k": lengths,
    "scaling_law_5m": scaling_law,
    "glue_from_scratch": glue,
    "glue_apart": glue_apart,
    "mqar_families": recall,
    "mqar_state_sizes": recall_by_seed,
    "lra_spade": arena,
    "lra_image": arena,
    "kv_groups": kv_groups,
    "lm_eval": lm_eval,
    "lm_eval_students": lm_eval,
    "scitldr": scitldr,
    "longhorn_scan": longhorn_scan,
    "cpu_kernels": cpu_kernels,
    "long_conv_counts": long_conv_counts,
    "longhorn_training": longhorn_training,
    "local_attention": local_attention,
    "decoding": decoding,
    "lmu_isa": lmu_isa,
    "training": training,
    "weight_only": weight_only,
    "half_prompts": half_prompts,
    "start_up": start_up,
    "long_context": long_context,
    "long_context_groups": long_context_groups,
    "long_context_longest": long_context_longest,
    "comparison": same_checks,
}


WITHOUT_RESULTS = {"checkpoints": checkpoints}  # which has no file of its own


def measured_on(figures: dict) -> str:
    """The machine, the versions and the commit, as far as the results tell them."""
    machine = figures["machine"]
    parts = [machine["processor"], f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"]
    parts += [machine[name] for name in ("instruction_set", "accelerator") if name in machine]
    versions = {"Python": "python", "torch": "torch", "transformers": "transformers"}
    parts += [f"{label} {machine[key]}" for label, key in versions.items() if machine.get(key)]
    return f"{', '.join(parts)}; commit {figures['commit']}"


def source(*several: dict) -> str:
    """A line below a table: of each file of results its command, unless the page names it, machine and commit."""
    commands = (f"`{figures['command']}`: " if "command" in figures else "" for figures in several)
    return f"*{'; '.join(command + measured_on(figures) for command, figures in zip(commands, several))}.*\n"


def rendered(text: str) -> str:
    """The document with every table made anew, and below each what it was measured on."""

    def table(match: re.Match) -> str:
        if match[2] in WITHOUT_RESULTS:
            return f"{match[1]}{WITHOUT_RESULTS[match[2]]()}{match[3]}"
        if not (RESULTS / f"{match[2]}.json").is_file():
            return f"{match[1]}Not measured: `python benchmarks/{match[2]}.py` does it.\n{match[3]}"
        figures = load(match[2])
        content = {key: value for key, value in figures.items() if key not in PROVENANCE}
        shown = source(figures, *(load(name) for name in ALSO.get(match[2], [])))
        return f"{match[1]}{TABLES[match[2]](content)}\n{shown}{match[3]}"

    return BLOCK.sub(table, text)


def main() -> None:
    pages = (ROOT / "README.md", ROOT / "checkpoints" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for path in pages:
        text = path.read_text(encoding="utf-8")
        if rendered(text) != text:
            path.write_text(rendered(text), encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
