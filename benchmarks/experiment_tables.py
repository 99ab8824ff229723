"""The tables of docs/experiments_tables.md, upcycling.md and upcycling_tables.md: from results to Markdown."""

import statistics
import sys
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from _lib.intervals import half_width, half_width_of, plus_minus, quantile, token_efficiencies
from table_text import load, markdown_table

from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import kinds_table

# tables of several files of results: the others
ALSO = {
    "glue_from_scratch": ["glue_pretrained", "glue_baselines"],
    "glue_apart": ["glue_apart_from_scratch", "glue_pretrained", "glue_baselines"],
    "scitldr": ["scitldr_new_weights", "scitldr_pretrained"],
}
# lm-eval's tasks of several choices: what guessing gives
GUESSES = {"piqa": 50, "hellaswag": 25, "winogrande": 50, "arc_easy": 25, "arc_challenge": 25, "openbookqa": 25}
GUESSES |= {"social_iqa": 100 / 3, "boolq": 50}
NORMAL = 1.96  # standard errors of a share that half of a 95 % interval is
NORMALISED = ("hellaswag", "arc_challenge")

# of compared models, those that the text sets against each other
PAIRS = (
    ("SPADE", "SPADE without its SSM"),
    ("BST", "sliding attention"),
    ("Longhorn", "Longhorn without its convolution"),
    ("Longhorn", "Mamba, its own code's initial values"),
    ("Llama with the convolution", "Llama"),
    ("Llama with the convolution", "Longhorn"),
    ("frozen S4", "window attention"),
    ("S5", "window attention"),
    ("S4, all trained", "frozen S4"),
    ("S5", "S4, all trained"),
    ("S5 in the middle", "S5 at the bottom"),
    ("S5 on top", "S5 at the bottom"),
    ("SH, layer 5", "SH, layer 1"),
    ("SH, layers 1 and 3", "SH, layer 3"),
    ("SH, layer 3, state of 128", "SH, layer 3, state of 4"),
    ("LMU-ISA with attention", "LMU-ISA"),
    ("LMU-ISA", "LSTM, three layers of LMU-ISA's width"),
)


def _mean_loss(found: dict) -> str:
    losses = [run["validation_loss"] for run in found["runs"]]
    return f"{statistics.mean(losses):.3f}{plus_minus(half_width(losses), 3)}"


def compared(figures: dict) -> str:
    """Best first, with the paired differences to the reference and, of runs that were evaluated as they went, how many
    times as many tokens the reference needs for the same loss; below, those within `PAIRS`."""
    models, searched, rows = figures["models"], figures.get("learning_rates"), []
    reference = models[figures["reference"]]["runs"]
    tokens = {name: token_efficiencies(found["runs"], reference) for name, found in models.items()}
    says_tokens = any(found is not None for found in tokens.values())
    for name, found in sorted(models.items(), key=lambda pair: pair[1]["validation_loss"]):
        difference = figures["differences"].get(name)
        minutes = sum(run["cpu_seconds"] for run in found["runs"]) / len(found["runs"]) / 60
        rows.append([
            name, f"{found['runs'][0]['parameters_beside_embeddings']:,}",
            *([min(searched[name], key=searched[name].__getitem__)] if searched else []),
            _mean_loss(found),
            f"{difference['mean']:+.3f} ± {difference['half_width_of_95_percent']:.3f}" if difference else "",
            *([_times(tokens[name]) if difference else ""] if says_tokens else []),
            f"{minutes:.1f}",
        ])  # fmt: skip
    head = ["model", "non-embedding parameters", *(["learning rate, best by this loss"] if searched else [])]
    head += ["held-out loss, nats per token, 95 %", f"minus {figures['reference']}'s, 95 %"]
    head += [f"tokens {figures['reference']} needs over its own, 95 %"] if says_tokens else []
    head += ["minutes of CPU time"]
    notes = []
    for name, without in PAIRS:
        if name in models and without in models:
            losses = [[run["validation_loss"] for run in models[each]["runs"]] for each in (name, without)]
            pairs = [one - other for one, other in zip(*losses)]
            added = ", ".join(f"{pair:+.3f}" for pair in pairs)
            notes.append(f"{name} minus {without}: {statistics.mean(pairs):+.3f} ± {half_width(pairs):.3f} ({added})")
    table = markdown_table(head, rows)
    return f"{table}\nPaired, and seed by seed: {'; '.join(notes)}.\n" if notes else table


def _times(found: dict | None) -> str:
    if found is None:
        return ""
    low, high = found["interval_of_95_percent"]
    return f"{found['mean']:.2f} ({low:.2f} to {high:.2f})"


def lengths(figures: dict) -> str:
    found = figures["models"]
    head = ["perplexity on held-out books, 95 %, by evaluation context length", *next(iter(found.values()))["points"]]
    head[1:] = [f"{point['length']:,}" for point in head[1:]]
    rows = []
    for name, model in found.items():
        cells = []
        for point in model["points"]:
            half = half_width_of(point["standard_deviation_of_loss"], model["checkpoints"])
            cells.append(f"{point['perplexity']:.2f}{plus_minus(half and point['perplexity'] * half, 2)}")
        rows.append([name, *cells])
    return markdown_table(head, rows)


def scaling_law(figures: dict) -> str:
    rows = []
    for family, found in figures["families"].items():
        for name, member in found["members"].items():
            losses = list(member["losses_by_seed"].values())
            loss = f"{member['validation_loss']:.3f}{plus_minus(half_width(losses), 3)}"
            rows.append([f"{family}, {name}", f"{member['parameters_beside_embeddings']:,}", loss])
    slopes = "; ".join(
        f"{family} {found['alpha']:.4f} ± {_slopes_half_width(found, len(found['members'])):.4f}"
        + (f" (mean of the seeds' own slopes ± {half:.4f})" if (half := half_width(found["alphas_by_seed"])) else "")
        for family, found in figures["families"].items()
    )
    if best := slopes_at_the_best_rates(figures["families"]):
        slopes += f"; each size at its best rate: {best}"
    head = ["model", "non-embedding parameters", "held-out loss, nats per token, 95 %"]
    return f"{markdown_table(head, rows)}\nSlopes alpha of loss = (N / N_c)^-alpha, 95 % of the fit: {slopes}.\n"


def _slopes_half_width(found: dict, sizes: int) -> float:
    return quantile(sizes - 2) * found["standard_error"]


def slopes_at_the_best_rates(families: dict) -> str:
    """Slopes of families that were trained at several rates ("NAME at RATE"), through the lowest loss of each size."""
    from scaling_law import fit  # a recipe, whose imports take seconds

    rates: dict[str, list[dict[str, dict]]] = {}
    for family, found in families.items():
        name, at, _ = family.rpartition(" at ")
        if at:
            rates.setdefault(name, []).append(found["members"])
    parts = []
    for name, tried in rates.items():
        if len(tried) > 1:
            best = [
                min((members[size] for members in tried if size in members), key=lambda one: one["validation_loss"])
                for size in max(tried, key=len)
            ]
            found = fit(*([one[key] for one in best] for key in ("parameters_beside_embeddings", "validation_loss")))
            parts.append(f"{name} {found['alpha']:.4f} ± {_slopes_half_width(found, len(best)):.4f}")
    return "; ".join(parts)


def glue(figures: dict) -> str:
    """Means over seeds from random initialisation and from the pre-trained weights, the paired difference of the
    first measure; and what words alone reach."""
    pretrained, words = (load(name) for name in ALSO["glue_from_scratch"])
    rows = []
    for task, found in figures.items():
        for split, measures in found["best"]["measures"].items():
            several = [
                {name: [run["measures"][split][name] for run in of["runs"]] for name in measures}
                for of in (found, pretrained[task])
            ]
            cells = [" / ".join(f"{statistics.mean(values):.1f}" for values in each.values()) for each in several]
            scratch, better = (next(iter(each.values())) for each in several)
            gains = [after - before for before, after in zip(scratch, better)]
            cells.append(f"{statistics.mean(gains):+.1f}{plus_minus(half_width(gains), 1)}")
            runs = words["tasks"][task]["runs"]
            for kind in ("bag of words", "word overlap"):
                means = (
                    [statistics.mean(run[kind][split][name] for run in runs if kind in run) for name in measures]
                    if kind in runs[0]
                    else []
                )
                cells.append(" / ".join(f"{value:.1f}" for value in means))
            cells.append(" / ".join(f"{value:.1f}" for value in found["best"]["majority"][split].values()))
            label = task if split == "validation" else f"{task} {split.removeprefix('validation_')}"
            rows.append([f"{label}, {' / '.join(measures)}", *cells])
    head = ["task, measure", "random initialisation", "pre-trained", "gain, 95 %"]
    head += ["bag of words", "word overlap", "majority"]
    return markdown_table(head, rows)


def glue_apart(figures: dict) -> str:
    """Pairs that are read apart, beside those read together; what pre-training gains, and what is gained over the
    better of words' two baselines, both paired by seed, in accuracy where there is one."""
    scratch, together, words = (load(name) for name in ALSO["glue_apart"])
    rows = []
    for task, found in figures.items():
        for split, measures in found["best"]["measures"].items():
            shown = "accuracy" if "accuracy" in measures else next(iter(measures))
            said = words["tasks"][task]["runs"]
            several = [[run["measures"][split] for run in of[task]["runs"]] for of in (together, scratch, figures)]
            several += [[run[kind][split] for run in said] for kind in ("bag of words", "word overlap")]
            means = [{name: statistics.mean(run[name] for run in runs) for name in measures} for runs in several]
            best = max(several[3:], key=lambda runs: statistics.mean(run[shown] for run in runs))
            label = task if split == "validation" else f"{task} {split.removeprefix('validation_')}"
            row = [f"{label}, {' / '.join(measures)}"]
            row += [" / ".join(f"{value:.1f}" for value in each.values()) for each in means]
            rows.append(row + [_gain(several[2], other, shown) for other in (several[1], best)])
    head = ["task, measure", "together, pre-trained", "apart, random initialisation", "apart, pre-trained"]
    head += ["bag of words", "word overlap", "gain of pre-training, 95 %"]
    head += ["apart, pre-trained, minus the better of words', 95 %"]
    return markdown_table(head, rows)


def _gain(runs: list[dict], others: list[dict], measure: str) -> str:
    pairs = [one[measure] - other[measure] for one, other in zip(runs, others)]
    return f"{statistics.mean(pairs):+.1f} ± {half_width(pairs):.1f}"


def first_token(figures: dict) -> str:
    """Right answers by distance, in percent, with 95 % intervals over seeds; a model a row."""
    models = figures["models"]
    distances = list(next(iter(models.values()))["accuracy"])
    rows = []
    for name, found in models.items():
        cells = []
        for distance, share in found["accuracy"].items():
            half = found["half_width_of_95_percent"][distance]
            cells.append(f"{100 * share:.0f}" + (f" ± {100 * half:.0f}" if half else ""))
        rows.append([name, f"{found['runs'][0]['parameters']:,}", *cells])
    seeds = len(next(iter(models.values()))["runs"])
    head = [
        "right answers, percent, 95 %, by tokens in between",
        "parameters",
        *(f"{int(each):,}" for each in distances),
    ]
    return f"{markdown_table(head, rows)}\n{seeds} seeds; guessing gives {100 / figures['settings']['answers']:.0f}.\n"


def recall(figures: dict) -> str:
    """Pairs found, in percent, at the best way to train, with 95 % intervals over its seeds."""
    found = figures["best"]
    pairs = list(found[0]["accuracy_by_pairs"])
    lengths = {entry["length"] for entry in found}
    rows = [
        [
            entry["model"] + (f", {entry['length']} tokens" if len(lengths) > 1 else ""),
            f"{entry['parameters']:,}",
            _trial(entry["trial"]),
            entry["epochs"],
            *(_share(entry, number) for number in pairs),
        ]
        for entry in found
    ]
    head = ["right answers, percent, 95 %", "parameters", "best rate and options by these answers", "epochs"]
    return markdown_table([*head, *(f"{each} pairs" for each in pairs)], rows)


def _trial(trial: dict) -> str:
    options = (f"`{name}={value}`" for name, value in trial.items() if name != "learning_rate")
    return ", ".join([f"{trial['learning_rate']:g}", *options])


def recall_by_seed(figures: dict) -> str:
    """Pairs found, in percent, at the one way to train: means, and each seed, since some have not begun to learn."""
    found = figures["best"]
    pairs = list(found[0]["accuracy_by_pairs"])
    rows = [
        [
            entry["model"],
            f"{entry['parameters']:,}",
            *(_percents([run["accuracy_by_pairs"][number] for run in entry["runs"]]) for number in pairs),
        ]
        for entry in found
    ]
    return markdown_table(["right answers, percent", "parameters", *(f"{each} pairs" for each in pairs)], rows)


def _share(entry: dict, pairs: str) -> str:
    same = [run for run in entry["runs"] if run["trial"] == entry["trial"]]
    half = half_width([100 * run["accuracy_by_pairs"][pairs] for run in same])
    return f"{100 * entry['accuracy_by_pairs'][pairs]:.1f}{plus_minus(half, 1)}"


def arena(figures: dict) -> str:
    """Test accuracy of the weights best on validation: tasks across, models down; with several seeds also by pairs."""
    tasks = figures["tasks"]
    names = list(next(iter(tasks.values())))
    rows = [[name, *(_accuracies(found[name]) for found in tasks.values())] for name in names]
    guesses = (found[names[0]][0]["test"]["commonest_class"] for found in tasks.values())
    table = markdown_table(
        ["test accuracy, percent, 95 % over seeds (minutes)", *tasks],
        [*rows, ["commonest class", *(f"{guess:.1f}" for guess in guesses)]],
    )
    notes = [
        f"{task}, {one} minus {other}: {_paired(runs[one], runs[other])}"
        for task, runs in tasks.items()
        for one, other in combinations(names, 2)
        if len(runs[one]) > 1
    ]
    return f"{table}\nPaired, and seed by seed: {'; '.join(notes)}.\n" if notes else table


def _accuracies(runs: list[dict]) -> str:
    found = [run["test"]["accuracy"] for run in runs]
    minutes = statistics.mean(run["seconds"] for run in runs) / 60
    return f"{statistics.mean(found):.1f}{plus_minus(half_width(found), 1)} ({minutes:.0f})"


def _paired(runs: list[dict], others: list[dict]) -> str:
    pairs = [one["test"]["accuracy"] - other["test"]["accuracy"] for one, other in zip(runs, others)]
    return f"{statistics.mean(pairs):+.1f} ± {half_width(pairs):.1f} ({', '.join(f'{pair:+.1f}' for pair in pairs)})"


def lm_eval(figures: dict) -> str:
    """Accuracy (of answers normalised by length where the paper's is) beside that of guessing; then perplexities, of
    the tasks that were run."""
    models = figures["models"]
    tasks = next(iter(models.values()))["tasks"]
    multiple_choice = [task for task in GUESSES if task in tasks]
    rows = []
    for task in multiple_choice:
        measure = "acc_norm" if task in NORMALISED else "acc"
        shares = (100 * found["tasks"][task][measure] for found in models.values())
        rows.append([f"{task}, {measure}", f"{GUESSES[task]:.1f}", *(f"{share:.1f}" for share in shares)])
    perplexities = (
        ("lambada_openai", "perplexity"),
        ("wikitext", "word_perplexity"),
        ("wikitext", "bits_per_byte"),
    )
    for task, measure in (each for each in perplexities if each[0] in tasks):
        values = (found["tasks"][task][measure] for found in models.values())
        rows.append(
            [f"{task}, {measure}", "", *(f"{value:,.0f}" if value > 100 else f"{value:.3f}" for value in values)]
        )
    errors = [
        found["tasks"][task][f"{'acc_norm' if task in NORMALISED else 'acc'}_stderr"]
        for found in models.values()
        for task in multiple_choice
    ]
    documents = tasks["piqa"]["documents"]
    half = 100 * NORMAL * max(errors)
    fewer = "".join(
        f" ({found['documents']} of {task})" for task, found in tasks.items() if found["documents"] < documents
    )
    note = f"{documents} documents of a task{fewer}; half the 95 % interval of a share is at most {half:.1f}."
    return f"{markdown_table(['task, measure', 'guessing', *models], rows)}\n{note}\n"


def scitldr(figures: dict) -> str:
    """The first sentence, a model of its own, and the committed one from random initialisation and from its own
    weights."""
    found = {
        "first sentence of the abstract": (figures, "first_sentence"),
        "SPADE from scratch": (figures, "model"),
        "the committed encoder-decoder, random initialisation": (load("scitldr_new_weights"), "model"),
        "the committed encoder-decoder": (load("scitldr_pretrained"), "model"),
    }
    rows = [
        [label, *(f"{of['test'][key][rouge]:.1f}" for rouge in ("rouge1", "rouge2", "rougeL"))]
        for label, (of, key) in found.items()
    ]
    return markdown_table(["SciTLDR, test", "ROUGE-1", "ROUGE-2", "ROUGE-L"], rows)


def upcycling_gaps(figures: dict) -> str:
    rows = []
    for name, found in {"the teacher": figures["teacher"], **figures["students"]}.items():
        loss = f"{found['loss']:.3f}{plus_minus(half_width([run['loss'] for run in found.get('runs', ())]), 3)}"
        over = f"{found.get('perplexity_over_teachers', 1.0):.3f}"
        rows.append([name, loss, over, f"{found['loss_in_long_windows']:.3f}", f"{found['cache_bytes'] / 2**20:,.1f}"])
    head = [
        "layers that keep attention",
        "held-out loss, 95 %",
        "perplexity over the teacher's",
        "loss at 4,096",
        "cache, MiB",
    ]
    return markdown_table(head, rows)


def upcycling_controls(figures: dict) -> str:
    """Loss by kind of text, then with the paired difference to the reference in all kinds together."""
    reference, differences = figures["settings"]["reference"], figures["differences"]
    kinds = list(figures["teacher"]["losses"])
    rows = [_losses_by_kind("the teacher, as it was", [figures["teacher"]], None)]
    rows += [
        _losses_by_kind(name, found["runs"], differences.get(name)) for name, found in figures["students"].items()
    ]
    head = ["model", "parameters", *kinds, "mean", f'minus that of "{reference}", 95 %', "mean at 4,096"]
    return markdown_table(head, rows)


def _losses_by_kind(name: str, runs: list[dict], difference: dict | None) -> list[str]:
    cells = []
    for kind in runs[0]["losses"]:
        cell = f"{statistics.mean(run['losses'][kind] for run in runs):.3f}"
        if difference is not None:
            cell += f" ({_interval(difference['by_kind'][kind])})"
        cells.append(cell)
    whole, windows = (statistics.mean(run[key] for run in runs) for key in ("loss", "loss_in_long_windows"))
    apart = "" if difference is None else _interval(difference)
    return [name, f"{runs[0]['parameters']:,}", *cells, f"{whole:.3f}", apart, f"{windows:.3f}"]


def _interval(found: dict) -> str:
    return f"{found['mean']:+.3f}{plus_minus(found['half_width_of_95_percent'], 3)}"


def upcycling_recall(figures: dict) -> str:
    """A table a task: right answers in percent, seed by seed where these differ, before and after training."""
    parts = []
    for task, models in figures["tasks"].items():
        measured = list(models["teacher"]["recall"])
        rows = []
        for name, found in models.items():
            for kind, label in (("recall_at_the_start", "translated"), ("recall", "trained")):
                if kind in found:
                    label = "" if name == "teacher" else f", {label}"
                    shares = ([run[kind][what] for run in found["runs"]] for what in measured)
                    rows.append([f"{name}{label}", *map(_percents, shares)])
        parts.append(markdown_table([f"{task}: right answers, percent", *measured], rows))
    return "\n".join(parts)


def upcycling_report(figures: dict) -> str:
    """Needles right with Wilson's intervals, loss by position where it was asked for, and the cache."""
    models, multiples = figures["models"], figures["settings"]["multiples"]
    lengths = [multiple * figures["settings"]["window"] for multiple in multiples]
    samples, parts = figures["settings"]["samples"], list(models["teacher"].get("loss", {"mean": ()})["mean"])[-2:]
    rows = []
    for name, found in models.items():
        needles = (found["recall"]["recall_needle"][f"{multiple}x"] for multiple in multiples)
        shown = (f"{each['right']} ({each['interval'][0]:.0%} to {each['interval'][1]:.0%})" for each in needles)
        losses = (f"{found['loss']['mean'][part]:.3f}" for part in parts)
        caches = (f"{found['cache_bytes'][length] / 2**20:,.0f}" for length in ("4096", "65536"))
        rows.append([name, *shown, *losses, *caches])
    head = ["model", *(f"needles of {samples} in {length:,} tokens, 95 %" for length in lengths)]
    head += [f"loss, tokens {part.replace('-', ' to ')}" for part in parts]
    return markdown_table([*head, "cache at 4,096, MiB", "at 65,536"], rows)


def upcycling_kinds(figures: dict) -> str:
    """Answers about facts of many kinds with Wilson's intervals, loss where it was asked for, and the cache."""
    models = figures["models"]
    answers = {
        name: {int(length): each for length, each in found["answers"].items()} for name, found in models.items()
    }
    table = kinds_table(answers)
    narrow = 1 + 2 * len(answers["teacher"])  # without a column for each kind
    parts = list(models["teacher"].get("loss", {"mean": ()})["mean"])[-2:]
    rows = [
        [
            *row[:narrow],
            *(f"{found['loss']['mean'][part]:.3f}" for part in parts),
            f"{found['cache_bytes']['65536'] / 2**20:,.0f}",
        ]
        for row, found in zip(table.rows, models.values(), strict=True)
    ]
    losses = [f"loss, tokens {part.replace('-', ' to ')}" for part in parts]
    return markdown_table([*table.columns[:narrow], *losses, "cache at 65,536, MiB"], rows)


def upcycling_grid(figures: dict) -> str:
    """Needles with Wilson's intervals, loss lost and cache, of students with so many full layers, chosen somehow."""
    models, settings = figures["models"], figures["settings"]
    (multiple,) = settings["multiples"]
    part = list(models["teacher"]["loss"]["mean"])[-2]
    rows = []
    for name, found in models.items():
        (needle,) = found["recall"]["recall_needle"].values()
        lost = found["loss"]["mean"][part] - models["teacher"]["loss"]["mean"][part]
        shown = f"{needle['right']} ({needle['interval'][0]:.0%} to {needle['interval'][1]:.0%})"
        cache = f"{found['cache_bytes']['65536'] / 2**20:,.0f}"
        rows.append([name, shown, "" if name == "teacher" else f"{lost:+.3f}", cache])
    needles = f"needles of {settings['samples']} in {multiple * settings['window']:,} tokens, 95 %"
    head = ["layers with full attention", needles, f"loss, tokens {part.replace('-', ' to ')}"]
    return markdown_table([*head, "cache at 65,536, MiB"], rows)


def upcycling_losses(figures: dict) -> str:
    """Loss by position of a teacher, and what students lose of it, with intervals over texts."""
    teacher = figures["models"]["teacher"]["loss"]
    rows = [["teacher", *(f"{loss:.3f}" for loss in teacher["mean"].values())]]
    for name, found in figures["models"].items():
        if name != "teacher":
            rows.append([name, *(_interval_of(each) for each in _differences(found["loss"], teacher))])
    head = [f"loss, and what is lost of it, 95 % over {len(teacher['by_text'])} books"]
    return markdown_table(head + _stretches(teacher["mean"]), rows)


def kv_groups(figures: dict) -> str:
    """What a teacher recalls with full attention in so many layers or key/value groups, and the cache."""
    rows = [
        [name, str(found["groups"]), f"{found['right']:.1%}", f"{found['log_probability']:.2f}",
         f"{found['cache_bytes'] / 2**20:,.0f}"]
        for name, found in figures["models"].items()
    ]  # fmt: skip
    tokens = figures["settings"]["tokens"]
    head = ["full attention in", "groups", f"right of {tokens} tokens", "log-probability", "cache at 65,536, MiB"]
    return markdown_table(head, rows)


def upcycling_memory(figures: dict) -> str:
    """Loss by position; of trained students minus that of the untrained one, paired over texts; and needles."""
    _, untrained, *trained = figures["models"]
    first = figures["models"][untrained]["loss"]
    rows = []
    for name, found in figures["models"].items():
        cells = [f"{loss:.3f}" for loss in found["loss"]["mean"].values()]
        if name in trained:
            differences = _differences(found["loss"], first)
            cells = [f"{cell} ({_interval_of(each)})" for cell, each in zip(cells, differences)]
        needles = found["recall"]["recall_needle"].values()
        rows.append([name, *cells, *(f"{each['right']} of {each['count']}" for each in needles)])
    tokens = (multiple * figures["settings"]["window"] for multiple in figures["settings"]["multiples"])
    needles = [f"needles in {length:,} tokens" for length in tokens]
    head = f"loss, and minus that of {untrained}, 95 % over {len(first['by_text'])} books"
    return markdown_table([head, *_stretches(first["mean"]), *needles], rows)


def upcycling_teacher(figures: dict) -> str:
    """Loss by position of a teacher and a student, as they were and trained on alike; a student's minus that of the
    teacher in the same state, paired over texts; and needles."""
    models, (trained, *_) = figures["models"], [name for name in figures["models"] if name.endswith("trained on")]
    (needles,) = (multiple * figures["settings"]["window"] for multiple in figures["settings"]["multiples"])
    rows = []
    for name, found in models.items():
        cells = [f"{loss:.3f}" for loss in found["loss"]["mean"].values()]
        if name != "teacher":
            other = models[trained if name.endswith("trained on") and name != trained else "teacher"]
            differences = _differences(found["loss"], other["loss"])
            cells = [f"{cell} ({_interval_of(each)})" for cell, each in zip(cells, differences)]
        (right,) = found["recall"]["recall_needle"].values()
        rows.append([name, *cells, f"{right['right']} of {right['count']}"])
    first = models["teacher"]["loss"]
    head = f"loss, and minus that of a teacher, 95 % over {len(first['by_text'])} books"
    return markdown_table([head, *_stretches(first["mean"]), f"needles in {needles:,} tokens"], rows)


def _differences(ours: dict, theirs: dict) -> list[list[float]]:
    """Of each stretch of positions, text by text."""
    pairs = list(zip(ours["by_text"], theirs["by_text"]))
    return [[own[part] - other[part] for own, other in pairs] for part in theirs["mean"]]


def _interval_of(differences: list[float]) -> str:
    return f"{statistics.mean(differences):+.3f} ± {half_width(differences):.3f}"


def _stretches(parts: dict) -> list[str]:
    return [f"tokens {int(begin):,} to {int(end):,}" for begin, end in (part.split("-") for part in parts)]


def _percents(shares: list[float]) -> str:
    seeds = [f"{100 * share:.0f}" for share in shares]
    return f"{100 * statistics.mean(shares):.0f}" + (f" ({', '.join(seeds)})" if len(set(seeds)) > 1 else "")


def rare_words(figures: dict) -> str:
    """What is saved at later mentions, by distance; first what the first one costs."""
    models = figures["models"]
    names = list(next(iter(models.values()))["saved"])
    rows = []
    for name, found in models.items():
        saved = [f"{each['mean']:.2f} ± {each['half_width_of_95_percent']:.2f}" for each in found["saved"].values()]
        rows.append([name, f"{found['first']['mean']:.2f}", *saved])
    borders = [name.partition("-")[::2] for name in names]
    head = ["nats per word, 95 %", "first mention", "saved, last mention {} to {} tokens ago".format(*borders[0])]
    head += [f"{low} to {int(high):,}" for low, high in borders[1:-1]] + [f"{borders[-1][0]} and more"]
    found = next(iter(models.values()))
    counts = ", ".join(f"{each['mentions']:,} of {each['words']:,}" for each in found["saved"].values())
    return (
        f"{markdown_table(head, rows)}\n{found['first']['mentions']:,} first mentions of {found['first']['words']:,} "
        f"words in {found['rows']} rows of {figures['settings']['row_length']:,} tokens; later mentions, by distance: "
        f"{counts}.\n"
    )


def settings_apart(figures: dict) -> str:
    """Of variants "model, settings": settings down, models across, with the paired difference to the model's first."""
    settings: dict[str, dict[str, dict[int, float]]] = {}
    for variant, found in figures["models"].items():
        model, _, combination = variant.partition(", ")
        losses = {run["seed"]: run["validation_loss"] for run in found["runs"]}
        settings.setdefault(combination, {})[model] = losses
    first, *others = settings
    models, rows = list(settings[first]), []
    for combination, of_models in settings.items():
        cells = []
        for model in models:
            losses, base = of_models[model], settings[first][model]
            pairs = [losses[seed] - base[seed] for seed in base]
            width = half_width(pairs)
            cells.append(f"{statistics.mean(losses.values()):.3f}")
            if combination in others:
                cells.append(f"{statistics.mean(pairs):+.3f}" + ("" if width is None else f" ± {width:.3f}"))
            else:
                cells.append("")
        rows.append([combination, *cells])
    columns = [f"{model}{what}" for model in models for what in ("", ", minus the first, 95 %")]
    return markdown_table(["held-out loss, nats per token", *columns], rows)


def rates_tried(figures: dict) -> str:
    """Of variants "model, settings": the loss at each rate with the first seed, at the best one with all seeds."""
    rates = figures["settings"]["learning_rates"]
    rows = []
    for name, tried in figures["learning_rates"].items():
        model = name.partition(", ")[0]
        first = next(other for other in figures["models"] if other.partition(", ")[0] == model)
        losses, base = (
            {run["seed"]: run["validation_loss"] for run in figures["models"][each]["runs"]} for each in (name, first)
        )
        pairs = [losses[seed] - base[seed] for seed in base]
        against = "" if name == first else f"{statistics.mean(pairs):+.3f} ± {half_width(pairs):.3f}"
        rows.append(
            [name, *(f"{tried[str(rate)]:.3f}" for rate in rates), f"{statistics.mean(losses.values()):.3f}", against]
        )
    head = ["held-out loss, nats per token", *(f"rate {rate:g}, seed 0" for rate in rates)]
    return markdown_table([*head, "best rate, all seeds", "minus the model's first, 95 %"], rows)
