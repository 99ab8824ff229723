"""Settings of a recipe: one YAML file, then `key=value` pairs from the command line that win over it."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML 1.1 reads 1e-3, which has no dot, as text


def read_settings(recipe: str, classes: Sequence[type], arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Fill the given dataclasses from `CONFIG.yaml [key=value ...]`.

    `$NAME` in a text is the environment variable of that name. A dot goes into a mapping: `config.hidden_size=256`.

    Raises:
        SystemExit: help was asked for (it is printed, and the status is 0), or no YAML file was named (status 1).
        ValueError: an unknown key, a pair without "=", or an environment variable that is not set.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        known = "\n".join(f"  {cls.__name__}: {', '.join(sorted(f.name for f in fields(cls)))}" for cls in classes)
        usage = f"usage: python recipes/{recipe} CONFIG.yaml [key=value ...]\n\nkeys:\n{known}"
        if not arguments:
            raise SystemExit(usage)
        print(usage)
        raise SystemExit(0)
    settings = yaml.safe_load(Path(arguments[0]).read_text(encoding="utf-8")) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"{arguments[0]} must hold `key: value` lines, got a {type(settings).__name__}.")
    for pair in arguments[1:]:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} must have the form key=value.")
        _set(settings, key.lstrip("-").split("."), _value(value))
    allowed = {field.name for cls in classes for field in fields(cls) if field.init}
    if unknown := sorted(set(settings) - allowed):
        raise ValueError(f"unknown settings {unknown}; the recipe knows {sorted(allowed)}.")
    return HfArgumentParser(classes).parse_dict(_expand(settings))


def _value(text: str) -> Any:
    # YAML 1.1 reads no and off as False, but they are names here, as in eval_strategy=no
    return text if text in ("no", "off", "yes", "on") else yaml.safe_load(text)


def _set(settings: dict, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        settings = settings.setdefault(name, {})
    settings[path[-1]] = value


def _expand(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _expand(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_expand(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if NUMBER.fullmatch(value):
        return float(value)
    expanded = os.path.expandvars(value)
    if "$" in expanded:
        raise ValueError(f"{value!r} names an environment variable that is not set.")
    return expanded
