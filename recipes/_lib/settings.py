"""Settings of a recipe: one YAML file, then `key=value` pairs from the command line that win over it."""

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields
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
        usage = f"usage: python recipes/{recipe} CONFIG.yaml [key=value ...]"
        usage = "\n\n".join([usage, *map(_described, classes)])
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


def _described(cls: type) -> str:
    """A group of keys with their types, defaults and meaning; of transformers' and TRL's many only the names."""
    title = (cls.__doc__ or "").strip().split("\n")[0]
    own = [field for field in fields(cls) if field.init]
    if cls.__module__.partition(".")[0] in ("transformers", "trl"):
        names = textwrap.fill(
            ", ".join(sorted(field.name for field in own)), 110, initial_indent="  ", subsequent_indent="  "
        )
        return f"{cls.__name__}, as documented by {cls.__module__.partition('.')[0]}:\n{names}"
    lines = []
    for field in own:
        kind = getattr(field.type, "__name__", str(field.type)) if isinstance(field.type, type) else str(field.type)
        if field.default is not MISSING:
            kind += f" = {field.default!r}"
        elif field.default_factory is not MISSING:
            kind += f" = {field.default_factory()!r}"
        else:
            kind += ", required"
        kind = kind.replace("typing.", "")
        meaning = str(field.metadata.get("help", ""))
        indent = " " * 32
        first = f"  {field.name}: {kind}"
        if meaning and len(first) < len(indent) - 1:
            lines.append(
                textwrap.fill(meaning, 110, initial_indent=first.ljust(len(indent)), subsequent_indent=indent)
            )
        else:
            lines.append(first)
            lines += textwrap.wrap(meaning, 110, initial_indent=indent, subsequent_indent=indent)
    return "\n".join([f"{cls.__name__}: {title}", *lines])


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
