"""Settings of a recipe: one YAML file, then `key=value` pairs from the command line that win over it."""

import os
import re
import sys
import textwrap
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser

from hf_hybrid_ssm.cli.settings import check_settings_known, closest, setting_pairs, starts_with_pair

NOT_READ = {"resume_from_checkpoint", "do_train", "do_eval", "do_predict"}
"""Of `TrainingArguments`, what only scripts read that pass it on; recipes have `resume`."""
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML 1.1 reads 1e-3, which has no dot, as text


def read_settings(recipe: str, classes: Sequence[type], arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Fill the given dataclasses from `[CONFIG.yaml] [key=value ...]`; `--key value` and `--key=value` are the same.

    `$NAME` in a text is the environment variable of that name. A dot goes into a mapping: `config.hidden_size=256`.
    Where a list is wanted, one value alone is a list of one, and null is the empty list.

    Raises:
        SystemExit: help was asked for (it is printed, and the status is 0), or nothing was given (status 1).
        FileNotFoundError: the YAML file is not there.
        ValueError: no YAML in it, an unknown or missing key, a value of another type than the key's, a pair without
            "=", or an environment variable that is not set.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        usage = f"usage: {command_of(recipe)} CONFIG.yaml [key=value ...]"
        usage = "\n\n".join([usage, *map(_described, classes)])
        if not arguments:
            raise SystemExit(usage)
        print(usage)
        raise SystemExit(0)
    is_pair = starts_with_pair(arguments)
    settings = {} if is_pair else _of_file(arguments[0])
    kinds = {field.name: kind for cls in classes for field, kind in _kinds(cls)}
    for key, text in setting_pairs(arguments[0 if is_pair else 1 :]):
        value = _value(text, f"{key}={text}")
        setting, dot, path = key.partition(".")
        settings[setting] = _with(settings.get(setting), path, value, kinds.get(setting), key) if dot else value
    if "gradient_checkpointing" not in settings and "activation_checkpointing" in settings:
        _rename_for_older_transformers(settings, classes)
    known = {field.name for cls in classes for field in fields(cls) if field.init}
    check_settings_known(settings, known, command_of(recipe))
    if unread := sorted(NOT_READ & set(settings)):
        raise ValueError(f"{unread[0]!r} is read by no recipe; those that go on with a stopped run have resume=auto.")
    settings = _expand(settings)
    for cls in classes:
        _as_lists(cls, settings)
        _check_types(cls, settings)
    return filled(classes, settings)


def filled(classes: Sequence[type], settings: dict[str, Any]) -> tuple[Any, ...]:
    """The dataclasses with these values. Without an accelerator `use_cpu` is set, unless the settings say otherwise:
    `bf16` of a configuration then means the processor's."""
    names = {field.name for cls in classes for field in fields(cls)}
    if "use_cpu" in names and not torch.accelerator.is_available():
        settings = {"use_cpu": True} | settings
    return HfArgumentParser(classes).parse_dict(settings)


def command_of(recipe: str) -> str:
    """How a recipe is started: from a clone as a script, from an installed package by the command."""
    is_installed = Path(__file__).resolve().parents[2].name == "hf_hybrid_ssm"
    return f"hf-hybrid-ssm recipe {recipe.removesuffix('.py')}" if is_installed else f"python recipes/{recipe}"


def _of_file(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path!r} is neither a YAML file of settings nor a pair key=value.")
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold `key: value` lines, got a {type(settings).__name__}.")
    return settings


def _rename_for_older_transformers(settings: dict, classes: Sequence[type]) -> None:
    """transformers 5.23 calls gradient_checkpointing activation_checkpointing."""
    known = {field.name for cls in classes for field in fields(cls)}
    if "activation_checkpointing" not in known and "gradient_checkpointing" in known:
        settings["gradient_checkpointing"] = settings.pop("activation_checkpointing")


def _kinds(cls: type) -> list[tuple[Field, Any]]:
    """The fields of a dataclass and their types."""
    kinds = get_type_hints(cls)
    return [(field, kinds[field.name]) for field in fields(cls)]


def _as_lists(cls: type, settings: dict[str, Any]) -> None:
    """Where a field holds a list: `files=own.txt` is `files=[own.txt]`, and null the empty list."""
    for field, kind in _kinds(cls):
        value = settings.get(field.name)
        if field.name not in settings or get_origin(kind) is not list or isinstance(value, list):
            continue
        (inner,) = get_args(kind)
        if value is None:
            settings[field.name] = []
        elif _fits(value, inner) and not isinstance(value, dict):
            settings[field.name] = [value]


def _check_types(cls: type, settings: dict[str, Any]) -> None:
    """Each given value is of its field's type, and what has no default is given."""
    for field, kind in _kinds(cls):
        if not field.init:
            continue
        if field.name not in settings:
            if field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"{field.name} is missing: {field.metadata.get('help', 'it has no default')}.")
        elif not _fits(settings[field.name], kind):
            value, wanted = settings[field.name], _name(kind)
            raise ValueError(f"{field.name}={value!r} is of type {type(value).__name__}, not {wanted}.")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value read from YAML may stand where `kind` is declared; kinds that YAML does not have take all."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if origin in (list, dict):
        inner = get_args(kind)[-1:]
        entries = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and (not inner or all(_fits(entry, inner[0]) for entry in entries))
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if kind in (bool, str, list, dict, type(None)):
        return isinstance(value, kind)
    return True


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


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


def _value(text: str, pair: str) -> Any:
    try:
        # YAML 1.1 reads no and off as False, but they are names here, as in eval_strategy=no
        return text if text in ("no", "off", "yes", "on") else yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{pair!r}: the value is not YAML; quote it, or close its brackets.") from None


def _with(given: Any, path: str, value: Any, kind: Any, key: str) -> dict[str, Any]:
    """A mapping with one more value at the end of `path`, of names with dots between them.

    The keys of a mapping to values of one kind, such as `dict[str, dict[str, Any]]`, are names that the user gave.
    They may hold anything, dots too, and a field of a name that is not there does not make it.

    Args:
        kind: the declared type of the mapping, or Any.
        key: the whole key, for messages.
    """
    mapping = {} if given is None else given
    parent = key[: len(key) - len(path) - 1]
    if not isinstance(mapping, dict):
        raise ValueError(f"{key}: {parent} is {mapping!r}, which has no fields.")
    entries = _entries(kind)
    are_mappings = entries is Any or _mapping(entries) is not None
    known = [name for name in mapping if f"{path}.".startswith(f"{name}.")]
    name = max(known, key=len, default=path.partition(".")[0] if are_mappings else path)
    if name == path:
        return mapping | {name: value}
    rest = path[len(name) + 1 :]
    if entries is not Any and not known:
        says = f"{parent} has no {name!r}{closest(name, map(str, mapping))}"
        raise ValueError(f"{key}: {says} {parent}.NAME=VALUE makes one.")
    return mapping | {name: _with(mapping.get(name), rest, value, entries, key)}


def _mapping(kind: Any) -> Any:
    """The `dict[...]` of a declared type, or None."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return next((each for each in kinds if get_origin(each) is dict), None)


def _entries(kind: Any) -> Any:
    """The declared type of a mapping's values; Any where it says none."""
    mapping = _mapping(kind)
    return Any if mapping is None else get_args(mapping)[1]


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
