"""How a recipe starts, and what it says when its input is wrong or somebody stops it."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from _lib.settings import read_settings

from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser
from yaml import YAMLError

from hf_hybrid_ssm.cli.errors import EXPECTED, INTERRUPTED, TRACEBACK, one_line
from hf_hybrid_ssm.cli.next_command import next_command
from hf_hybrid_ssm.cli.settings import as_flags

INPUT = (*EXPECTED, YAMLError, StrictDataclassError, DatasetsError)
_training = [False]


def training_begins() -> None:
    """From now on an error is more than wrong input, and shows where it comes from."""
    _training[0] = True


def start(recipe: str, run: Callable[..., Any], *classes: type, then: Sequence[str] | None = None) -> None:
    """`run` with its settings of these classes, from the command line; see `guarded`.

    Args:
        then: the words after `hf-hybrid-ssm` of a command that can be typed next, with `{model}` for the folder that
            the run left its model in (`output_dir`).
    """

    def run_and_tell() -> None:
        settings = read_settings(recipe, classes)
        run(*settings)
        folder = next((each.output_dir for each in settings if hasattr(each, "output_dir")), None)
        if then is not None and folder is not None and os.environ.get("RANK", "0") == "0":
            command = next_command(*(word.format(model=folder) for word in then))
            print(f"\nThe model is in {folder}. {command}")

    guarded(recipe, run_and_tell)


def parsed(kind: type) -> Any:
    """The dataclass from flags: `--key value ...`, or `key=value`."""
    known = {field.name for field in fields(kind)}
    return HfArgumentParser(kind).parse_args_into_dataclasses(as_flags(sys.argv[1:], known))[0]


def guarded(recipe: str, run: Callable[[], Any]) -> None:
    """`run`; what is wrong with the input is one line, and status 1. After Ctrl-C the status is 130.

    Raises:
        SystemExit: with that line or status.
    """
    _training[0] = False  # of a recipe that this process ran before
    try:
        run()
    except KeyboardInterrupt:
        print(f"\n{recipe}: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except INPUT as error:
        if _training[0] or os.environ.get(TRACEBACK):
            raise
        raise SystemExit(f"{recipe}: {one_line(error)}") from None
