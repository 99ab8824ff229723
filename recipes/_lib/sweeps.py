"""Many runs in one folder: a sweep that was stopped goes on with those it lacks."""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _lib.checks import check_output, is_first_process
from _lib.provenance import to_json
from _lib.training import write_json

from accelerate import PartialState
from transformers import TrainingArguments

from hf_hybrid_ssm.hub.reading import read_json

SETTINGS = "settings.json"


def check_claim(folder: str | Path, settings: dict[str, Any], overwrite: bool) -> None:
    """What `claim` will raise, before hours of reading."""
    if not _is_known(folder, settings):
        check_output(folder, overwrite)


def claim(folder: str | Path, settings: dict[str, Any], overwrite: bool, runs: str) -> None:
    """The folder is this sweep's; what the files `runs` (a pattern) hold is kept if its settings were the same.

    Called when settings, data and checkpoints have been read: with `overwrite`, runs of an earlier sweep are deleted.

    Raises:
        FileExistsError: it holds something else.
    """
    known = Path(folder) / SETTINGS
    with _first_process_first():
        is_same = _is_known(folder, settings)
        if not is_same or (overwrite and is_first_process()):
            check_output(folder, overwrite)
            for old in Path(folder).glob(runs):
                old.unlink()
            write_json(known, settings)


def _is_known(folder: str | Path, settings: dict[str, Any]) -> bool:
    known = Path(folder) / SETTINGS
    return known.is_file() and known.read_text(encoding="utf-8") == to_json(settings)


def _first_process_first() -> AbstractContextManager[None]:
    """What the first process does is done when the others begin."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return PartialState().main_process_first()
    return nullcontext()


def once(path: str | Path, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result in the file `path`, made unless it is there."""
    if Path(path).is_file():
        return read_json(Path(path))
    found = run()
    write_json(path, found)
    return json.loads(to_json(found))  # as it is read the next time


def settings_of(
    arguments: Any, training: TrainingArguments | None = None, without: Iterable[str] = ()
) -> dict[str, Any]:
    """What a sweep depends on: the values of a dataclass, and of a training, but for where it writes.

    Args:
        without: further names that are left out.
    """
    given = (asdict(arguments) if arguments is not None else {}) | ({} if training is None else training.to_dict())
    left_out = {"results", "overwrite", "output_dir", "logging_dir", *without}
    return {name: value for name, value in given.items() if name not in left_out}
