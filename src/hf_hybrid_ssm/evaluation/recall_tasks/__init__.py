"""Recall tasks for lm-eval: what a text said one to many windows ago. Their files lie beside the code."""

import re
from collections.abc import Iterable
from pathlib import Path

RECALL_FOLDER = Path(__file__).parent
RECALL_TASKS = tuple(f"recall_{kind}" for kind in ("needle", "several", "distractors", "variables", "pairs"))
TAG = "recall"
# lm-eval's parser takes each of these for --tasks, and what follows in the same argument for its value
OPTION = re.compile(r"-t|--ta(?:s|sk|sks)?")
OPTION_AND_VALUE = re.compile(r"(-t=?|--ta(?:s|sk|sks)?=)(.+)")


def with_tag(tasks: Iterable[str]) -> list[str]:
    """The names of tasks; all recall tasks in place of their tag."""
    return [name for task in tasks for name in (RECALL_TASKS if task == TAG else (task,))]


def with_files(arguments: Iterable[str]) -> list[str]:
    """Arguments of lm-eval's command line, in which `--tasks` (`-t`) names recall tasks by their files, so that it
    finds them beside those of any `--include_path`."""
    changed, follows = [], False
    for argument in arguments:
        option, names = "", None
        if found := OPTION_AND_VALUE.fullmatch(argument):
            option, names = found.groups()
        elif follows and not argument.startswith("-"):
            names = argument
        follows = OPTION.fullmatch(argument) is not None or (follows and not argument.startswith("-"))
        changed.append(argument if names is None else option + ",".join(map(_file, with_tag(names.split(",")))))
    return changed


def _file(task: str) -> str:
    return str(RECALL_FOLDER / f"{task}.yaml") if task in RECALL_TASKS else task
