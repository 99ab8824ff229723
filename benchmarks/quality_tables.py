"""Tables of loss, recall and accuracy, each from the figures of one file of results."""

import statistics
import sys
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from _lib.intervals import half_width, half_width_of, plus_minus, quantile, token_efficiencies

from benchmarks.table_text import load, markdown_table, rows_of

Figures = dict[str, Any]
# tables of several files of results: the others
ALSO = {
    "glue_from_scratch": ["glue_pretrained", "glue_baselines"],
    "glue_apart": ["glue_apart_from_scratch", "glue_pretrained", "glue_baselines"],
    "scitldr": ["scitldr_new_weights", "scitldr_pretrained"],
}
# lm-eval's tasks of several choices: what guessing gives
GUESSES = {"piqa": 50, "hellaswag": 25, "winogrande": 50, "arc_easy": 25, "arc_challenge": 25, "openbookqa": 25}
GUESSES |= {"social_iqa": 100 / 3, "boolq": 50}
NORMALISED = ("hellaswag", "arc_challenge")
PERPLEXITIES = (("lambada_openai", "perplexity"), ("wikitext", "word_perplexity"), ("wikitext", "bits_per_byte"))
NORMAL = 1.96  # standard errors of a share that half of a 95 % interval is
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


def mean(values: Sequence[float], digits: int, sign: str = "") -> str:
    """With half the 95 % interval where there are several values; `sign` "+" for a difference."""
    return f"{statistics.mean(values):{sign}.{digits}f}{plus_minus(half_width(values), digits)}"


def paired(values: Sequence[float], others: Sequence[float], digits: int = 3, *, by_seed: bool = False) -> str:
    """The mean difference with its interval; seed by seed in brackets."""
    pairs = [one - other for one, other in zip(values, others)]
    added = f" ({', '.join(f'{pair:+.{digits}f}' for pair in pairs)})" if by_seed else ""
    return mean(pairs, digits, "+") + added


def slashed(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def _losses(found: Figures) -> list[float]:
    return [run["validation_loss"] for run in found["runs"]]


def _first(models: Figures) -> Any:
    return next(iter(models.values()))


# -- models that were trained alike -----------------------------------------------------------------------------------


def compared(figures: Figures) -> str:
    """Best first, with the paired differences to the reference and, of runs that were evaluated as they went, how many
    times as many tokens the reference needs for the same loss; below, those within `PAIRS`."""
    models, reference, searched = figures["models"], figures["reference"], figures.get("learning_rates")
    tokens = {name: token_efficiencies(found["runs"], models[reference]["runs"]) for name, found in models.items()}
    says_tokens = any(found is not None for found in tokens.values())
    rows = []
    for name, found in sorted(models.items(), key=lambda pair: pair[1]["validation_loss"]):
        apart = figures["differences"].get(name)
        minutes = statistics.mean(run["cpu_seconds"] for run in found["runs"]) / 60
        rows.append([
            name, f"{found['runs'][0]['parameters_beside_embeddings']:,}",
            *([min(searched[name], key=searched[name].__getitem__)] if searched else []),
            mean(_losses(found), 3), difference(apart) if apart else "",
            *([_times(tokens[name]) if apart else ""] if says_tokens else []), f"{minutes:.1f}",
        ])  # fmt: skip
    head = ["model", "non-embedding parameters", *(["learning rate, best by this loss"] if searched else [])]
    head += ["held-out loss, nats per token, 95 %", f"minus {reference}'s, 95 %"]
    head += [f"tokens {reference} needs over its own, 95 %"] if says_tokens else []
    notes = [
        f"{name} minus {without}: {paired(_losses(models[name]), _losses(models[without]), by_seed=True)}"
        for name, without in PAIRS
        if name in models and without in models
    ]
    return _with_pairs(markdown_table([*head, "minutes of CPU time"], rows), notes)


def _with_pairs(table: str, notes: list[str]) -> str:
    return f"{table}\nPaired, and seed by seed: {'; '.join(notes)}.\n" if notes else table


def difference(found: Figures) -> str:
    return f"{found['mean']:+.3f}{plus_minus(found['half_width_of_95_percent'], 3)}"


def _times(found: Figures | None) -> str:
    return "" if found is None else "{:.2f} ({:.2f} to {:.2f})".format(found["mean"], *found["interval_of_95_percent"])


def lengths(figures: Figures) -> str:
    rows = []
    for name, model in figures["models"].items():
        row = [name]
        for point in model["points"]:
            half = half_width_of(point["standard_deviation_of_loss"], model["checkpoints"])
            row.append(f"{point['perplexity']:.2f}{plus_minus(half and point['perplexity'] * half, 2)}")
        rows.append(row)
    head = [f"{point['length']:,}" for point in _first(figures["models"])["points"]]
    return markdown_table(["perplexity on held-out books, 95 %, by evaluation context length", *head], rows)


def scaling_law(figures: Figures) -> str:
    families = figures["families"]
    rows = [
        [
            f"{family}, {name}",
            f"{member['parameters_beside_embeddings']:,}",
            f"{member['validation_loss']:.3f}{plus_minus(half_width(list(member['losses_by_seed'].values())), 3)}",
        ]
        for family, found in families.items()
        for name, member in found["members"].items()
    ]
    slopes = "; ".join(
        f"{family} {_slope(found, len(found['members']))}"
        + (f" (mean of the seeds' own slopes ± {half:.4f})" if (half := half_width(found["alphas_by_seed"])) else "")
        for family, found in families.items()
    )
    if best := _slopes_at_the_best_rates(families):
        slopes += f"; each size at its best rate: {best}"
    head = ["model", "non-embedding parameters", "held-out loss, nats per token, 95 %"]
    return f"{markdown_table(head, rows)}\nSlopes alpha of loss = (N / N_c)^-alpha, 95 % of the fit: {slopes}.\n"


def _slope(found: Figures, sizes: int) -> str:
    return f"{found['alpha']:.4f} ± {quantile(sizes - 2) * found['standard_error']:.4f}"


def _slopes_at_the_best_rates(families: Figures) -> str:
    """Of families that were trained at several rates ("NAME at RATE"), through the lowest loss of each size."""
    from scaling_law import fit  # a recipe, whose imports take seconds

    rates: dict[str, list[Figures]] = {}
    for family, found in families.items():
        if " at " in family:
            rates.setdefault(family.rpartition(" at ")[0], []).append(found["members"])
    parts = []
    for name, tried in rates.items():
        if len(tried) > 1:
            best = [
                min((members[size] for members in tried if size in members), key=lambda one: one["validation_loss"])
                for size in max(tried, key=len)
            ]
            found = fit(*([one[key] for one in best] for key in ("parameters_beside_embeddings", "validation_loss")))
            parts.append(f"{name} {_slope(found, len(best))}")
    return "; ".join(parts)


def _by_seed(found: Figures) -> dict[int, float]:
    return {run["seed"]: run["validation_loss"] for run in found["runs"]}


def _minus(losses: dict[int, float], base: dict[int, float]) -> str:
    return paired([losses[seed] for seed in base], list(base.values()))


def settings_apart(figures: Figures) -> str:
    """Of variants "model, settings": settings down, models across, with the paired difference to the model's first."""
    settings: dict[str, dict[str, dict[int, float]]] = {}
    for variant, found in figures["models"].items():
        model, _, combination = variant.partition(", ")
        settings.setdefault(combination, {})[model] = _by_seed(found)
    first = _first(settings)
    rows = [
        [
            combination,
            *(
                cell
                for model, base in first.items()
                for cell in (
                    f"{statistics.mean(losses[model].values()):.3f}",
                    "" if losses is first else _minus(losses[model], base),
                )
            ),
        ]
        for combination, losses in settings.items()
    ]
    columns = [f"{model}{what}" for model in first for what in ("", ", minus the first, 95 %")]
    return markdown_table(["held-out loss, nats per token", *columns], rows)


def rates_tried(figures: Figures) -> str:
    """Of variants "model, settings": the loss at each rate with the first seed, at the best one with all seeds."""
    rates, models = figures["settings"]["learning_rates"], figures["models"]
    rows = []
    for name, tried in figures["learning_rates"].items():
        first = next(other for other in models if other.partition(", ")[0] == name.partition(", ")[0])
        losses = _by_seed(models[name])
        against = "" if name == first else _minus(losses, _by_seed(models[first]))
        of_rates = (f"{tried[str(rate)]:.3f}" for rate in rates)
        rows.append([name, *of_rates, f"{statistics.mean(losses.values()):.3f}", against])
    head = ["held-out loss, nats per token", *(f"rate {rate:g}, seed 0" for rate in rates)]
    return markdown_table([*head, "best rate, all seeds", "minus the model's first, 95 %"], rows)


# -- tasks ------------------------------------------------------------------------------------------------------------


def _glue_rows(figures: Figures):
    """Task, label, split and measures, the first of them that counts."""
    for task, found in figures.items():
        for split, measures in found["best"]["measures"].items():
            label = task if split == "validation" else f"{task} {split.removeprefix('validation_')}"
            yield task, f"{label}, {' / '.join(measures)}", split, list(measures)


def _of(runs: list[Figures], kind: str, split: str) -> list[Figures]:
    return [run[kind][split] for run in runs if kind in run]


def _means(runs: list[Figures], names: list[str]) -> str:
    return slashed(statistics.mean(run[name] for run in runs) for name in names) if runs else ""


def glue(figures: Figures) -> str:
    """Means over seeds from random initialisation and from the pre-trained weights, the paired difference of the
    first measure; and what words alone reach."""
    pretrained, words = (load(name) for name in ALSO["glue_from_scratch"])
    rows = []
    for task, label, split, names in _glue_rows(figures):
        scratch, better = (_of(of[task]["runs"], "measures", split) for of in (figures, pretrained))
        gain = paired(*([run[names[0]] for run in runs] for runs in (better, scratch)), 1)
        said = (_of(words["tasks"][task]["runs"], kind, split) for kind in ("bag of words", "word overlap"))
        majority = slashed(figures[task]["best"]["majority"][split].values())
        rows.append(
            [label, _means(scratch, names), _means(better, names), gain, *(_means(s, names) for s in said), majority]
        )
    head = ["task, measure", "random initialisation", "pre-trained", "gain, 95 %"]
    return markdown_table([*head, "bag of words", "word overlap", "majority"], rows)


def glue_apart(figures: Figures) -> str:
    """Pairs that are read apart, beside those read together; what pre-training gains, and what is gained over the
    better of words' two baselines, both paired by seed, in accuracy where there is one."""
    scratch, together, words = (load(name) for name in ALSO["glue_apart"])
    rows = []
    for task, label, split, names in _glue_rows(figures):
        shown = "accuracy" if "accuracy" in names else names[0]
        several = [_of(of[task]["runs"], "measures", split) for of in (together, scratch, figures)]
        several += [_of(words["tasks"][task]["runs"], kind, split) for kind in ("bag of words", "word overlap")]
        _, before, after, *said = ([run[shown] for run in runs] for runs in several)
        gains = [paired(after, other, 1) for other in (before, max(said, key=statistics.mean))]
        rows.append([label, *(_means(runs, names) for runs in several), *gains])
    head = ["task, measure", "together, pre-trained", "apart, random initialisation", "apart, pre-trained"]
    head += ["bag of words", "word overlap", "gain of pre-training, 95 %"]
    return markdown_table([*head, "apart, pre-trained, minus the better of words', 95 %"], rows)


def first_token(figures: Figures) -> str:
    """Right answers by distance, in percent, with 95 % intervals over seeds; a model a row."""
    models = figures["models"]
    rows = []
    for name, found in models.items():
        halves = found["half_width_of_95_percent"]
        cells = [
            f"{100 * share:.0f}" + (f" ± {100 * halves[distance]:.0f}" if halves[distance] else "")
            for distance, share in found["accuracy"].items()
        ]
        rows.append([name, f"{found['runs'][0]['parameters']:,}", *cells])
    head = ["right answers, percent, 95 %, by tokens in between", "parameters"]
    head += [f"{int(each):,}" for each in _first(models)["accuracy"]]
    guess = 100 / figures["settings"]["answers"]
    return f"{markdown_table(head, rows)}\n{len(_first(models)['runs'])} seeds; guessing gives {guess:.0f}.\n"


def recall(figures: Figures) -> str:
    """Pairs found, in percent, at the best way to train, with 95 % intervals over its seeds."""
    found = figures["best"]
    pairs = list(found[0]["accuracy_by_pairs"])
    several = len({entry["length"] for entry in found}) > 1
    rows = []
    for entry in found:
        trial = dict(entry["trial"])
        options = [f"{trial.pop('learning_rate'):g}", *(f"`{name}={value}`" for name, value in trial.items())]
        same = [run["accuracy_by_pairs"] for run in entry["runs"] if run["trial"] == entry["trial"]]
        halves = (half_width([100 * run[number] for run in same]) for number in pairs)
        shares = (
            f"{100 * entry['accuracy_by_pairs'][number]:.1f}{plus_minus(half, 1)}"
            for number, half in zip(pairs, halves)
        )
        label = entry["model"] + (f", {entry['length']} tokens" if several else "")
        rows.append([label, f"{entry['parameters']:,}", ", ".join(options), entry["epochs"], *shares])
    head = ["right answers, percent, 95 %", "parameters", "best rate and options by these answers", "epochs"]
    return markdown_table([*head, *(f"{each} pairs" for each in pairs)], rows)


def recall_by_seed(figures: Figures) -> str:
    """Pairs found, in percent, at the one way to train: means, and each seed, since some have not begun to learn."""
    pairs = list(figures["best"][0]["accuracy_by_pairs"])
    rows = [
        [
            entry["model"],
            f"{entry['parameters']:,}",
            *(percents([run["accuracy_by_pairs"][number] for run in entry["runs"]]) for number in pairs),
        ]
        for entry in figures["best"]
    ]
    return markdown_table(["right answers, percent", "parameters", *(f"{each} pairs" for each in pairs)], rows)


def percents(shares: list[float]) -> str:
    seeds = [f"{100 * share:.0f}" for share in shares]
    return f"{100 * statistics.mean(shares):.0f}" + (f" ({', '.join(seeds)})" if len(set(seeds)) > 1 else "")


def arena(figures: Figures) -> str:
    """Test accuracy of the weights best on validation: tasks across, models down; with several seeds also by pairs."""
    tasks = figures["tasks"]
    names = list(_first(tasks))

    def accuracies(runs: list[Figures]) -> list[float]:
        return [run["test"]["accuracy"] for run in runs]

    def cell(runs: list[Figures]) -> str:
        return f"{mean(accuracies(runs), 1)} ({statistics.mean(run['seconds'] for run in runs) / 60:.0f})"

    rows = [[name, *(cell(found[name]) for found in tasks.values())] for name in names]
    rows += [
        ["commonest class", *(f"{found[names[0]][0]['test']['commonest_class']:.1f}" for found in tasks.values())]
    ]
    notes = [
        f"{task}, {one} minus {other}: {paired(accuracies(runs[one]), accuracies(runs[other]), 1, by_seed=True)}"
        for task, runs in tasks.items()
        for one, other in combinations(names, 2)
        if len(runs[one]) > 1
    ]
    return _with_pairs(markdown_table(["test accuracy, percent, 95 % over seeds (minutes)", *tasks], rows), notes)


def lm_eval(figures: Figures) -> str:
    """Accuracy (of answers normalised by length where the paper's is) beside that of guessing; then perplexities, of
    the tasks that were run."""
    models = figures["models"]
    tasks, results = _first(models)["tasks"], [found["tasks"] for found in models.values()]
    measures = {task: "acc_norm" if task in NORMALISED else "acc" for task in GUESSES if task in tasks}
    rows = [
        [f"{task}, {measure}", f"{GUESSES[task]:.1f}", *(f"{100 * found[task][measure]:.1f}" for found in results)]
        for task, measure in measures.items()
    ]
    for task, measure in (each for each in PERPLEXITIES if each[0] in tasks):
        values = (found[task][measure] for found in results)
        shown = (f"{value:,.0f}" if value > 100 else f"{value:.3f}" for value in values)
        rows.append([f"{task}, {measure}", "", *shown])
    half = (
        100 * NORMAL * max(found[task][f"{measure}_stderr"] for found in results for task, measure in measures.items())
    )
    documents = tasks["piqa"]["documents"]
    fewer = "".join(f" ({f['documents']} of {task})" for task, f in tasks.items() if f["documents"] < documents)
    note = f"{documents} documents of a task{fewer}; half the 95 % interval of a share is at most {half:.1f}."
    return f"{markdown_table(['task, measure', 'guessing', *models], rows)}\n{note}\n"


def scitldr(figures: Figures) -> str:
    """The first sentence, a model of its own, and the committed one from random initialisation and from its own
    weights."""
    found = {
        "first sentence of the abstract": figures["test"]["first_sentence"],
        "SPADE from scratch": figures["test"]["model"],
        "the committed encoder-decoder, random initialisation": load("scitldr_new_weights")["test"]["model"],
        "the committed encoder-decoder": load("scitldr_pretrained")["test"]["model"],
    }
    rows = rows_of(found, "{rouge1:.1f}", "{rouge2:.1f}", "{rougeL:.1f}")
    return markdown_table(["SciTLDR, test", "ROUGE-1", "ROUGE-2", "ROUGE-L"], rows)


def rare_words(figures: Figures) -> str:
    """What is saved at later mentions, by distance; first what the first one costs."""
    models, found = figures["models"], _first(figures["models"])
    saved = (f"{{saved[{at}][mean]:.2f}} ± {{saved[{at}][half_width_of_95_percent]:.2f}}" for at in found["saved"])
    rows = rows_of(models, "{first[mean]:.2f}", *saved)
    first, *between, last = (name.partition("-")[::2] for name in found["saved"])
    head = ["nats per word, 95 %", "first mention", "saved, last mention {} to {} tokens ago".format(*first)]
    head += [f"{low} to {int(high):,}" for low, high in between] + [f"{last[0]} and more"]
    counts = ", ".join("{mentions:,} of {words:,}".format(**each) for each in found["saved"].values())
    return (
        f"{markdown_table(head, rows)}\n{found['first']['mentions']:,} first mentions of {found['first']['words']:,} "
        f"words in {found['rows']} rows of {figures['settings']['row_length']:,} tokens; later mentions, by distance: "
        f"{counts}.\n"
    )
