"""How a recipe starts, and what it says when its input is wrong or somebody stops it."""

import os
import sys
from collections.abc import Callable
from typing import Any

from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from yaml import YAMLError

from _lib.settings import read_settings
from hf_hybrid_ssm.cli.errors import EXPECTED, INTERRUPTED, TRACEBACK, one_line

INPUT = (*EXPECTED, YAMLError, StrictDataclassError, DatasetsError)
_training = [False]


def training_begins() -> None:
    """From now on an error is more than wrong input, and shows where it comes from."""
    _training[0] = True


def start(recipe: str, run: Callable[..., Any], *classes: type) -> None:
    """`run` with its settings of these classes, from the command line; see `guarded`."""
    guarded(recipe, lambda: run(*read_settings(recipe, classes)))


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
