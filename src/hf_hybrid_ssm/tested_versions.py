"""Versions of other packages: the lowest that serve, and the newest that the tests have run with."""

import logging
import re
from functools import lru_cache
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Tested(NamedTuple):
    """The ends of a range."""

    lowest: str
    newest: str


TESTED = {
    "torch": Tested("2.6", "2.14.1"),
    "transformers": Tested("5.16", "5.24.0"),
    "peft": Tested("0.18", "0.21.2"),
    "trl": Tested("1.0", "1.16.0"),
    "vllm": Tested("0.29", "0.32.0"),
    "triton": Tested("3.6", "3.9.0"),
}


def outside(package: str, version: str) -> str | None:
    """Whether a version is "older" or "newer" than what was tested, or None.

    The third number of a version counts for nothing: it changes no interface.
    """
    lowest, newest = (_minor(end) for end in TESTED[package])
    return "older" if _minor(version) < lowest else "newer" if _minor(version) > newest else None


@lru_cache
def warn_of_untested_transformers(version: str) -> None:
    """Log in one line, once in a process, that the tests have run with no transformers so old, or so new."""
    if (where := outside("transformers", version)) is not None:
        end = TESTED["transformers"]
        known = f"{end.newest}, the newest" if where == "newer" else f"{end.lowest}, the oldest"
        logger.warning("transformers %s is %s than %s that these models are tested with.", version, where, known)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
