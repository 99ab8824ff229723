"""Settings of recipes as they stand on a command line: `key=value`, `--key=value` and `--key value` are the same.

Nothing here takes long to import, so that a misspelt key is said before torch is loaded.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

PAIR = re.compile(r"-{0,2}[A-Za-z_][\w-]*(\.[\w-]+)*=")


def starts_with_pair(arguments: Sequence[str]) -> bool:
    """Whether the first argument is a setting, and not a file of settings."""
    first = arguments[0]
    return first.startswith("--") or ("=" in first and not Path(first).is_file())


def setting_pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The keys and values; `--key` without a value is true.

    Raises:
        ValueError: something has none of these forms.
    """
    pairs, rest = [], list(arguments)
    while rest:
        key, equals, value = rest.pop(0).partition("=")
        if not equals and not key.startswith("--"):
            raise ValueError(f"{key!r} must have the form key=value or --key value.")
        if not equals:  # a value may begin with one hyphen: a negative number
            value = "true" if not rest or rest[0].startswith("--") or PAIR.match(rest[0]) else rest.pop(0)
        pairs.append((key.removeprefix("--").replace("-", "_"), value))
    return pairs


def as_flags(arguments: Iterable[str]) -> list[str]:
    """`key=value` as `--key=value`, for parsers of flags; files that have such a name stay as they are."""
    return [
        f"--{each}" if PAIR.match(each) and each[0] != "-" and not Path(each).exists() else each for each in arguments
    ]


def check_settings_known(settings: Iterable[str], known: Iterable[str], command: str) -> None:
    """Every setting is one that the recipe has.

    Args:
        command: how the recipe is started.

    Raises:
        ValueError: names those that it has not, and what may have been meant.
    """
    known = sorted(known)
    complaints = []
    for name in sorted(set(settings) - set(known)):
        close = difflib.get_close_matches(name, known, n=1)
        complaints.append(f"{name!r}, did you mean {close[0]!r}?" if close else f"{name!r}.")
    if complaints:
        raise ValueError(f"unknown setting {' '.join(complaints)} `{command} --help` lists all of them.")
