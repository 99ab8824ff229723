"""Settings of recipes as they stand on a command line: `key=value`, `--key=value` and `--key value` are the same.

Nothing here takes long to import, so that a misspelt key is said before torch is loaded.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from os.path import exists, isfile  # of a text that is too long for a path: False, where pathlib raises

PAIR = re.compile(r"-{0,2}[A-Za-z_][\w-]*(\.[^\s.=][^.=]*)*=")  # names of variants have spaces and commas


def starts_with_pair(arguments: Sequence[str]) -> bool:
    """Whether the first argument is a setting, and not a file of settings."""
    first = arguments[0]
    return first.startswith("--") or ("=" in first and not isfile(first))


def setting_pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The keys and values; `--key` without a value is true.

    A hyphen in a setting's name is an underscore, as in other commands' flags. What follows a dot stays as it is: it
    may be a name, such as that of a variant.

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
        setting, dot, path = key.removeprefix("--").partition(".")
        pairs.append((setting.replace("-", "_") + dot + path, value))
    return pairs


def as_flags(arguments: Iterable[str], known: Collection[str] | None = None) -> list[str]:
    """`key=value` as `--key=value`, for parsers of flags; files that have such a name stay as they are.

    Args:
        known: the flags, where others are values of a flag (`--held_out novels=A.jsonl`).
    """

    def is_flag(text: str) -> bool:
        is_known = known is None or text.partition("=")[0] in known
        return bool(PAIR.match(text)) and text[0] != "-" and is_known and not exists(text)

    return [f"--{each}" if is_flag(each) else each for each in arguments]


def check_settings_known(settings: Iterable[str], known: Iterable[str], command: str) -> None:
    """Every setting is one that the recipe has.

    Args:
        command: how the recipe is started.

    Raises:
        ValueError: names those that it has not, and what may have been meant.
    """
    known = sorted(known)
    if complaints := [f"{name!r}{closest(name, known)}" for name in sorted(set(settings) - set(known))]:
        raise ValueError(f"unknown setting {' '.join(complaints)} `{command} --help` lists all of them.")


def closest(name: str, known: Iterable[str]) -> str:
    """What may have been meant, as the end of a sentence: all that begin so, or else the nearest."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=len(known)) if known else []
    # of those that are as near, the one with the same letters in another order
    near.sort(key=lambda each: (-difflib.SequenceMatcher(None, each, name).ratio(), sorted(each) != sorted(name)))
    candidates = [each for each in known if each.startswith(name)] or near[:1]
    return f", did you mean {' or '.join(map(repr, candidates))}?" if candidates else "."
