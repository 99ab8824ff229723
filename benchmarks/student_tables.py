"""Tables of students of pretrained models, each from the figures of one file of results."""

import statistics
from typing import Any

from benchmarks.quality_tables import Figures, difference, half_width, paired, percents, plus_minus
from benchmarks.table_text import markdown_table, mebibytes, rows_of
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import kinds_table


def upcycling_gaps(figures: Figures) -> str:
    rows = rows_of(
        {"the teacher": {"perplexity_over_teachers": 1.0} | figures["teacher"], **figures["students"]},
        lambda of: f"{of['loss']:.3f}{plus_minus(half_width([run['loss'] for run in of.get('runs', ())]), 3)}",
        "{perplexity_over_teachers:.3f}",
        "{loss_in_long_windows:.3f}",
        lambda of: mebibytes(of["cache_bytes"], 1),
    )
    head = ["layers that keep attention", "held-out loss, 95 %", "perplexity over the teacher's", "loss at 4,096"]
    return markdown_table([*head, "cache, MiB"], rows)


def upcycling_controls(figures: Figures) -> str:
    """Loss by kind of text, then with the paired difference to the reference in all kinds together."""
    models = {"the teacher, as it was": [figures["teacher"]]}
    models |= {name: found["runs"] for name, found in figures["students"].items()}
    rows = []
    for name, runs in models.items():
        apart = figures["differences"].get(name)
        row = [name, f"{runs[0]['parameters']:,}"]
        for kind in runs[0]["losses"]:
            loss = f"{statistics.mean(run['losses'][kind] for run in runs):.3f}"
            row.append(f"{loss} ({difference(apart['by_kind'][kind])})" if apart else loss)
        whole, windows = (f"{statistics.mean(run[k] for run in runs):.3f}" for k in ("loss", "loss_in_long_windows"))
        rows.append([*row, whole, difference(apart) if apart else "", windows])
    minus = f'minus that of "{figures["settings"]["reference"]}", 95 %'
    head = ["model", "parameters", *figures["teacher"]["losses"], "mean", minus, "mean at 4,096"]
    return markdown_table(head, rows)


def upcycling_recall(figures: Figures) -> str:
    """A table a task: right answers in percent, seed by seed where these differ, before and after training."""
    parts = []
    for task, models in figures["tasks"].items():
        measured, rows = list(models["teacher"]["recall"]), []
        for name, found in models.items():
            for kind, label in (("recall_at_the_start", ", translated"), ("recall", ", trained")):
                if kind in found:
                    shares = ([run[kind][what] for run in found["runs"]] for what in measured)
                    rows.append([name + label * (name != "teacher"), *map(percents, shares)])
        parts.append(markdown_table([f"{task}: right answers, percent", *measured], rows))
    return "\n".join(parts)


def _needles(figures: Figures) -> tuple[list[str], list[str]]:
    """Heads and columns of needles right with Wilson's intervals, for texts of each length."""
    settings = figures["settings"]
    heads = [f"needles of {settings['samples']} in {tokens} tokens, 95 %" for tokens in _texts(settings)]
    found = (f"recall[recall_needle][{multiple}x]" for multiple in settings["multiples"])
    return heads, [f"{{{at}[right]}} ({{{at}[interval][0]:.0%}} to {{{at}[interval][1]:.0%}})" for at in found]


def _texts(settings: Figures) -> list[str]:
    return [f"{multiple * settings['window']:,}" for multiple in settings["multiples"]]


def _cache(tokens: int) -> Any:
    return lambda found: mebibytes(found["cache_bytes"][str(tokens)])


def _parts_of_loss(models: Figures) -> list[str]:
    """The last two stretches of positions, where loss was asked for."""
    return list(models["teacher"].get("loss", {"mean": ()})["mean"])[-2:]


def _losses_at(parts: list[str]) -> tuple[list[str], list[str]]:
    """Heads and columns."""
    heads = [f"loss, tokens {part.replace('-', ' to ')}" for part in parts]
    return heads, [f"{{loss[mean][{part}]:.3f}}" for part in parts]


def upcycling_report(figures: Figures) -> str:
    """Needles right, loss by position where it was asked for, and the cache."""
    models = figures["models"]
    (needles, right), (losses, lost) = _needles(figures), _losses_at(_parts_of_loss(models))
    head = ["model", *needles, *losses, "cache at 4,096, MiB", "at 65,536"]
    return markdown_table(head, rows_of(models, *right, *lost, _cache(4096), _cache(65536)))


def upcycling_kinds(figures: Figures) -> str:
    """Answers about facts of many kinds with Wilson's intervals, loss where it was asked for, and the cache."""
    models = figures["models"]
    answers = {
        name: {int(length): each for length, each in found["answers"].items()} for name, found in models.items()
    }
    table, (losses, lost) = kinds_table(answers), _losses_at(_parts_of_loss(models))
    narrow = 1 + 2 * len(answers["teacher"])  # without a column for each kind
    more = rows_of(models, *lost, _cache(65536))
    rows = [[*row[:narrow], *beside] for row, (_, *beside) in zip(table.rows, more, strict=True)]
    return markdown_table([*table.columns[:narrow], *losses, "cache at 65,536, MiB"], rows)


def upcycling_grid(figures: Figures) -> str:
    """Needles, loss lost and cache, of students with so many full layers, chosen somehow."""
    models, ((needles,), right) = figures["models"], _needles(figures)
    part, _ = _parts_of_loss(models)
    teacher = models["teacher"]["loss"]["mean"]

    def lost(found: Figures) -> str:
        mean = found["loss"]["mean"]
        return "" if mean is teacher else f"{mean[part] - teacher[part]:+.3f}"

    head = ["layers with full attention", needles, *_losses_at([part])[0], "cache at 65,536, MiB"]
    return markdown_table(head, rows_of(models, *right, lost, _cache(65536)))


def kv_groups(figures: Figures) -> str:
    """What a teacher recalls with full attention in so many layers or key/value groups, and the cache."""
    columns = ("{groups}", "{right:.1%}", "{log_probability:.2f}", lambda of: mebibytes(of["cache_bytes"]))
    right = f"right of {figures['settings']['tokens']} tokens"
    head = ["full attention in", "groups", right, "log-probability", "cache at 65,536, MiB"]
    return markdown_table(head, rows_of(figures["models"], *columns))


def _loss_by_position(figures: Figures, head: str, bases: dict[str, str], *, alone: bool = False) -> str:
    """Loss by position, and needles where they were asked for.

    Args:
        bases: model → the one whose loss is taken from its own, text by text.
        alone: the difference without the loss itself.
    """
    models = figures["models"]
    first = next(iter(models.values()))["loss"]
    rows = []
    for name, found in models.items():
        row = [name]
        for part, loss in found["loss"]["mean"].items():
            cell = f"{loss:.3f}"
            if name in bases:
                texts = ([text[part] for text in models[of]["loss"]["by_text"]] for of in (name, bases[name]))
                apart = paired(*texts)
                cell = apart if alone else f"{cell} ({apart})"
            row.append(cell)
        needles = found.get("recall", {}).get("recall_needle", {}) if not alone else {}
        rows.append(row + [f"{each['right']} of {each['count']}" for each in needles.values()])
    parts = ["tokens {:,} to {:,}".format(*map(int, part.split("-"))) for part in first["mean"]]
    needles = [] if alone else [f"needles in {tokens} tokens" for tokens in _texts(figures["settings"])]
    return markdown_table([f"{head}, 95 % over {len(first['by_text'])} books", *parts, *needles], rows)


def upcycling_losses(figures: Figures) -> str:
    """Of a teacher, and what students lose of it, with intervals over texts."""
    others = [name for name in figures["models"] if name != "teacher"]
    return _loss_by_position(figures, "loss, and what is lost of it", dict.fromkeys(others, "teacher"), alone=True)


def upcycling_memory(figures: Figures) -> str:
    """Of trained students minus that of the untrained one, paired over texts; and needles."""
    _, untrained, *trained = figures["models"]
    return _loss_by_position(figures, f"loss, and minus that of {untrained}", dict.fromkeys(trained, untrained))


def upcycling_teacher(figures: Figures) -> str:
    """Of a teacher and a student, as they were and trained on alike; a student's minus that of the teacher in the same
    state, paired over texts; and needles."""
    trained, *_ = (name for name in figures["models"] if name.endswith("trained on"))
    bases = {
        name: trained if name.endswith("trained on") and name != trained else "teacher"
        for name in figures["models"]
        if name != "teacher"
    }
    return _loss_by_position(figures, "loss, and minus that of a teacher", bases)
