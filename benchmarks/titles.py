"""What each picture of benchmarks/results shows, in a sentence, and the size of its models: made from its figures."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.long_context_table import LABELS, LLAMA_CPP, TEACHER, milliseconds

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
KEPT = 0.05  # perplexity that changes by less is kept
KNOWN = 0.99  # the share of right answers of a model that knows them


def amount(number: float) -> str:
    """About so many parameters."""
    return f"{number / 1e6:.1f} million" if number >= 1e6 else f"{round(number, -3):,.0f}"


def between(values: Iterable[float]) -> str:
    low, high = amount(min(values := list(values))), amount(max(values))
    return f"{low} parameters" if low == high else f"{low} to {high} parameters"


def by_context(figures: dict, sizes: str) -> tuple[str, str]:
    models = {name: found["points"] for name, found in figures["models"].items()}
    change = {name: points[-1]["perplexity"] / points[0]["perplexity"] - 1 for name, points in models.items()}
    points = next(iter(models.values()))
    moved = [f"{name} {value:+.0%}" for name, value in change.items() if abs(value) >= KEPT]
    kept = max((abs(value) for value in change.values() if abs(value) < KEPT), default=0.0)
    rest = f"{'the others' if moved else 'all'} within ±{max(kept, 0.001):.1%}"
    span = f"From {points[0]['length']:,} to {points[-1]['length']:,} tokens"
    return f"{span} perplexity changes: {', '.join([*moved, rest])}", sizes


def seeds(figures: dict) -> str:
    return so_many(max(found["checkpoints"] for found in figures["models"].values()))


def so_many(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def of_stack(figures: dict) -> str:
    config = figures["settings"]["base"]["config"]
    return f"{config['num_hidden_layers']} layers of width {config['hidden_size']}, {seeds(figures)}"


def families_length(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    return by_context(figures, f"{trained(load('families_books'))}, {seeds(figures)}")


def checkpoints_length(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    named = [CHECKPOINTS / f"{name}-books/results.json" for name in ("longhorn", "llama")]
    sizes = [json.loads(path.read_text(encoding="utf-8"))["parameters"] for path in named]
    return by_context(figures, f"{between(sizes)}, {seeds(figures)}")


def trained(figures: dict) -> str:
    return f"models of {between(run['parameters'] for found in figures['models'].values() for run in found['runs'])}"


def families_books(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    losses = {name: found["validation_loss"] for name, found in figures["models"].items()}
    best, reference = min(losses, key=losses.__getitem__), figures["reference"]
    below = losses[reference] - losses[best]
    finding = f"{best} learns most from the same tokens: {below:.2f} nats below {reference}"
    runs = len(figures["models"][best]["runs"])
    return finding, f"{trained(figures)}, {runs} seeds"


def first_token_recall(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    models, settings = figures["models"], figures["settings"]
    inside = [str(distance) for distance in settings["distances"] if distance < settings["length"]]
    knowing = [name for name, found in models.items() if min(found["accuracy"][at] for at in inside) >= KNOWN]
    guess = 1.5 / settings["answers"]
    guessing = [name for name, found in models.items() if max(found["accuracy"].values()) < guess]
    finding = f"{len(knowing)} of {len(models)} models know the first token as far away as in training"
    finding += "; windows guess" if guessing and all("windows alone" in name for name in guessing) else ""
    config = settings["config"]
    sizes = between(found["runs"][0]["parameters"] for found in models.values())
    return finding, f"{config['num_hidden_layers']} layers of width {config['hidden_size']}, {sizes}; bars: 95 %"


def mqar_families(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    pairs = max(figures["best"][0]["accuracy_by_pairs"], key=int)
    shares = {entry["model"]: entry["accuracy_by_pairs"][pairs] for entry in figures["best"]}
    first, second, *others = sorted(shares, key=shares.__getitem__, reverse=True)
    finding = f"Of {pairs} pairs {first} recalls {shares[first]:.0%}, {second} {shares[second]:.0%}, "
    finding += f"the others at most {max(shares[name] for name in others):.0%}"
    epochs = max(entry["epochs"] for entry in figures["best"])
    seeds = {run["seed"] for run in figures["best"][0]["runs"]}
    sizes = between(entry["parameters"] for entry in figures["best"])
    return finding, f"{sizes}, {epochs} epochs at most, {len(seeds)} seeds"


def per_token_loss(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    start, changes = 32, []
    for found in figures["models"].values():
        after = [loss for place, loss in zip(found["positions"], found["loss"]) if place >= start]
        changes.append(max(after) - min(after))
    trained = load("lmu_isa_tokens")["models"]
    sizes = [trained[name]["runs"][0]["parameters_beside_embeddings"] for name in figures["models"]]
    finding = f"From token {start} on, losses stay within {max(changes):.2f} nats: little is learnt from further back"
    return finding, f"models of {between(sizes)} (non-embedding)"


def size_of(member: dict) -> float:
    return member["parameters_beside_embeddings"] if "parameters_beside_embeddings" in member else member["parameters"]


def scaling_law(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    from scaling_law import PAPER  # a recipe, on whose path plots.py is

    alphas = [found["alpha"] for found in figures["families"].values()]
    theirs = [alpha for name, (_, alpha) in PAPER.items() if name.startswith("LMU-ISA")]
    members = [member for found in figures["families"].values() for member in found["members"].values()]
    finding = f"Losses fall as size to the power {-max(alphas):.3f} at most, in the paper {-max(theirs):.3f}"
    return finding, f"{between(map(size_of, members))} (non-embedding), {so_many(len(figures['seeds']))}"


def upcycling_controls(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    found = figures["differences"]["a quarter"]["mean"]
    teacher = figures["students"][figures["settings"]["reference"]]["runs"][0]["parameters"]
    finding = f"With a quarter of the attention a student has {math.exp(found) - 1:.1%} more perplexity"
    return (
        f"{finding} than a teacher that goes on",
        f"the teacher: a Llama of {amount(teacher)} parameters; bars: 95 %",
    )


def students(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    """The student that finds most needles at the nearest distance, beside its teacher."""
    models = {name: found["recall"]["recall_needle"] for name, found in figures["models"].items()}
    window, nearest = figures["settings"]["window"], next(iter(models["teacher"]))
    best = max((name for name in models if name != "teacher"), key=lambda name: models[name][nearest]["right"])
    cell = models[best][nearest]
    length = max(figures["models"]["teacher"]["cache_bytes"], key=int)
    less = figures["models"]["teacher"]["cache_bytes"][length] / figures["models"][best]["cache_bytes"][length]
    finding = f"{best[0].upper()}{best[1:]}: {cell['right']} of {cell['count']} needles in "
    finding += f"{window * int(nearest.removesuffix('x')):,} tokens, with a cache {less:.1f} times smaller"
    name = figures["settings"]["teacher"].partition(".")[0]
    return finding, f"{name} and models made of it; bars: 95 %"


def kept_layers(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    """As many layers, chosen in three ways."""
    found = {name: next(iter(each["recall"]["recall_needle"].values())) for name, each in figures["models"].items()}
    most = max(int(name.split()[0]) for name in found if name.endswith("even"))
    of_way = {way: found[f"{most} {way}"]["right"] for way in ("by recall", "by kl", "even")}
    finding = (
        f"{most} layers with full attention find {of_way['by recall']} of {found['teacher']['count']} needles if "
    )
    finding += f"chosen by recall, {of_way['by kl']} if by KL, {of_way['even']} if evenly spaced"
    name, window = figures["settings"]["teacher"].partition(".")[0], figures["settings"]["window"]
    return finding, f"{name}, windows of {window} in its other layers, untrained; bars: 95 %"


def loss_by_position(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    found = {name: model["loss"]["mean"] for name, model in figures["models"].items()}
    part = list(found["teacher"])[-1]
    begin, end = (f"{int(edge):,}" for edge in part.split("-"))
    finding = f"Between {begin} and {end} tokens the teacher's loss is {found['teacher'][part]:.2f}, "
    finding += f"with windows of 256 in all layers it is {found['windows of 256'][part]:.2f}"
    texts = len(figures["models"]["teacher"]["loss"]["by_text"])
    return finding, f"{figures['settings']['teacher'].partition('.')[0]}, {texts} books; no layers trained"


def training(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    times, shape = figures["training_step"]["longhorn_native_times_as_fast"], figures["shape"]
    finding = f"At width {shape['hidden_size']} Longhorn trains {times['llama']:.1f} times as fast as Llama"
    return finding, f"{shape['num_hidden_layers']} layers, vocabulary {shape['vocab_size']}; a small model"


def long_context(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    """The student that is ahead of the teacher by most, at the longest length that both have in the same form."""
    found = milliseconds(figures)
    ratios = []
    for (model, form), times in found.items():
        teacher = found.get((TEACHER, form), {})
        if model not in (TEACHER, LLAMA_CPP) and (both := times.keys() & teacher.keys()):
            longest = max(both)
            ratios.append((longest, teacher[longest] / times[longest], LABELS[model], form))
    longest, ratio, name, form = max(ratios)
    finding = f"After {longest:,} tokens {name} in {form} writes {ratio:.1f} times as fast as its teacher"
    shape = figures["teacher"]
    return finding, f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']}, {shape['name']}"


def streaming(figures: dict, load: Callable[[str], dict]) -> tuple[str, str]:
    from benchmarks.pictures import llama_cache_megabytes

    found = figures["models"]["longhorn, trained, on text"]
    megabytes, tokens = found["resident_megabytes_by_stretch"], found["tokens"]
    finding = f"{tokens:,} tokens add {max(megabytes) - megabytes[0]:.1f} MB to a Longhorn, "
    finding += f"and would add {llama_cache_megabytes(tokens):,.0f} MB of keys and values to its Llama"
    return finding, "models of 4.1 and 4.3 million parameters"


SENTENCES: dict[str, Callable[[dict, Callable[[str], dict]], tuple[str, str]]] = {
    "training": training,
    "long_context": long_context,
    "streaming": streaming,
    "bst_16k": lambda figures, load: by_context(figures, of_stack(figures)),
    "bst_books": lambda figures, load: by_context(figures, of_stack(figures)),
    "checkpoints_length": checkpoints_length,
    "families_books": families_books,
    "families_length": families_length,
    "first_token_recall": first_token_recall,
    "first_token_noise": first_token_recall,
    "mqar_families": mqar_families,
    "per_token_loss": per_token_loss,
    "scaling_law_5m": scaling_law,
    "upcycling_controls": upcycling_controls,
    "upcycling_grid_256": kept_layers,
    "upcycling_positions": loss_by_position,
    "upcycling_report": students,
}
SOURCES = {"training": "longhorn_training"}  # of the others the name


def title(name: str, load: Callable[[str], dict]) -> tuple[str, str]:
    """The finding, and the size of the models."""
    figures: dict[str, Any] = load(SOURCES.get(name, name))
    return SENTENCES[name](figures, load)
