"""Recall tasks for lm-eval: what a text said one to many windows ago. Their files lie beside the code."""

from collections.abc import Iterable
from pathlib import Path

RECALL_FOLDER = Path(__file__).parent
RECALL_TASKS = tuple(f"recall_{kind}" for kind in ("needle", "several", "distractors", "variables", "pairs"))
TAG = "recall"


def with_tag(tasks: Iterable[str]) -> list[str]:
    """The names of tasks; all recall tasks in place of their tag."""
    return [name for task in tasks for name in (RECALL_TASKS if task == TAG else (task,))]


def with_files(arguments: Iterable[str]) -> list[str]:
    """Arguments of lm-eval's command line, in which `--tasks` names recall tasks by their files, so that it finds
    them beside those of any `--include_path`."""
    changed, follows = [], False
    for argument in arguments:
        follows = argument == "--tasks" or (follows and not argument.startswith("-"))
        if argument.startswith("--tasks=") or (follows and argument != "--tasks"):
            option, equals, names = argument.rpartition("=")
            tasks = with_tag(names.split(","))
            argument = option + equals + ",".join(_file(task) for task in tasks)
        changed.append(argument)
    return changed


def _file(task: str) -> str:
    return str(RECALL_FOLDER / f"{task}.yaml") if task in RECALL_TASKS else task
