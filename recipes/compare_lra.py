"""Compare classifiers on tasks of the Long Range Arena.

All train for the same number of steps, with several seeds, and one table shows the results.

    python recipes/compare_lra.py recipes/configs/lra/spade_cpu.yaml [key=value ...]

`base` holds settings of lra.py, `tasks` what differs by task, `variants` what differs by model. Writes results.json to
`output_dir`, and to `results`. What was stopped goes on with the runs it lacks.
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from _lib.checks import check_named
from _lib.entry import start
from _lib.settings import filled
from _lib.sweeps import check_claim, claim, once
from _lib.training import say, write_figures

from compare import merged
from lra import LraArguments, arena
from transformers import TrainingArguments


@dataclass
class CompareLraArguments:
    """Which models on which tasks."""

    base: dict[str, Any] = field(metadata={"help": "settings of lra.py"})
    tasks: dict[str, dict[str, Any]] = field(metadata={"help": "task: settings that differ"})
    variants: dict[str, dict[str, Any]] = field(metadata={"help": "model: settings that differ"})
    seeds: list[int] = field(default_factory=lambda: [42])
    output_dir: str = "runs/lra"
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        check_named(self, "seeds", "tasks", "variants")


def settings_of(arguments: CompareLraArguments) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(task, model, seed) → settings of lra.py, seed by seed, so that an interrupted comparison is still fair."""
    found = {}
    for task, seed, name in product(arguments.tasks, arguments.seeds, arguments.variants):
        each = merged(merged(arguments.base, arguments.tasks[task]), arguments.variants[name])
        folder = Path(arguments.output_dir) / f"{task}-{name}-{seed}"
        found[task, name, seed] = each | {"task": task, "seed": seed, "output_dir": str(folder), "overwrite": True}
    return found


def compare_lra(arguments: CompareLraArguments) -> dict[str, Any]:
    """All runs, task by task; returns what is written to results.json."""
    settings = {name: getattr(arguments, name) for name in ("base", "tasks", "variants")}
    folder = Path(arguments.output_dir)
    classes = (LraArguments, TrainingArguments)
    runs = {place: filled(classes, each) for place, each in settings_of(arguments).items()}
    # all have been read: a wrong setting of the last one cannot cost the first one's hours
    check_claim(folder, settings, arguments.overwrite)
    for each, _ in runs.values():
        if not Path(each.data_folder).is_dir():
            raise FileNotFoundError(f"data_folder={each.data_folder!r} of {each.task} is not a folder.")
    claim(folder, settings, arguments.overwrite, "*/run.json")
    found: dict[str, dict[str, Any]] = {task: {name: [] for name in arguments.variants} for task in arguments.tasks}
    for (task, name, seed), each in runs.items():
        made = once(folder / f"{task}-{name}-{seed}" / "run.json", partial(arena, *each))
        found[task][name].append({"seed": seed, **made})
        say(f"{task}, {name}, seed {seed}: {made['test']}")
    figures = {"settings": settings, "tasks": found}
    write_figures(figures, folder, arguments.results)
    return figures


if __name__ == "__main__":
    start("compare_lra.py", compare_lra, CompareLraArguments)
