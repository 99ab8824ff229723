"""Configurations of folders and from fields, with errors that say in one line what is wrong."""

import copy
import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from hf_hybrid_ssm.hub.one_line import in_one_line
from hf_hybrid_ssm.hub.saved_configuration import check_saved_configuration
from hf_hybrid_ssm.hub.verify_files import read_config
from hf_hybrid_ssm.models import family_of
from hf_hybrid_ssm.students.family import FAMILY as STUDENTS

# transformers takes these as arguments of every configuration, besides its fields
ARGUMENTS = frozenset({"num_labels", "attn_implementation", "torch_dtype", "rope_theta", "rope_scaling"})
# families read the ids of special tokens, declared or not: T5 reads its decoder's first token and does not declare it
TOKEN_IDS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"})


def config_of_folder(folder: str | os.PathLike, of_transformers: bool = False) -> PreTrainedConfig:
    """The configuration of a saved model. No code of the folder runs: transformers looks for code only where it does
    not know the `model_type`, and such a folder is refused before it is asked.

    Args:
        of_transformers: of any model that transformers knows; else of this package.

    Raises:
        ValueError: config.json is missing, is of another family, or has a field of a wrong type or value.
    """
    where = Path(folder)
    saved, file = read_config(where), where / "config.json"
    kind = saved.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{file} has no model_type, which says whose model this is. No code of the folder is run.")
    if kind != STUDENTS.model_type and not of_transformers:
        family_of(kind)
    elif kind not in CONFIG_MAPPING:
        raise ValueError(f"{file}: model_type={kind!r} is not known to transformers. No code of the folder is run.")
    try:
        if "configuration_files" in saved:
            raise ValueError("configuration_files names other files, which transformers would read instead of this")
        if kind != STUDENTS.model_type:  # a student's are checked with its teacher's class, below
            check_saved_configuration(saved, CONFIG_MAPPING[kind])
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        names = config.architectures
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise TypeError(f"architectures={names!r} must be a list of class names")
        return config
    except Exception as error:  # whatever a value raises that nobody expected
        raise ValueError(f"{file}: {in_one_line(error)}") from error


def new_config(model_type: str, preset: str | None = None, **fields: Any) -> PreTrainedConfig:
    """A configuration of any family that transformers knows; `preset` is a size of this package's families.

    Raises:
        ValueError: the family, the preset or a field does not exist, or a value does not fit.
    """
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type={model_type!r} is not known to transformers{_meant(model_type, CONFIG_MAPPING)}")
    config_class = CONFIG_MAPPING[model_type]
    check_fields(config_class, fields)
    if preset is not None and not hasattr(config_class, "preset"):
        raise ValueError(
            f"preset={preset!r}: {config_class.__name__} has none; they belong to this package's families."
        )
    try:
        return config_class(**fields) if preset is None else config_class.preset(preset, **fields)
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(f"{config_class.__name__}: {in_one_line(error)}") from error


def with_fields(config: Any, fields: Mapping[str, Any]) -> Any:
    """The configuration of this package with other values of some fields; what is derived from them follows.

    Raises:
        ValueError: a field does not exist, or a value does not fit.
    """
    check_fields(type(config), fields)
    changed = copy.deepcopy(config)
    try:
        for name, value in fields.items():
            setattr(changed, name, value)
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(f"{type(config).__name__}: {in_one_line(error)}") from error
    changed.validate_layer_type()
    changed.validate_architecture()
    return changed


def without_memory(build: Callable[[], Any], file: str | os.PathLike | None = None) -> Any:
    """The model that `build` makes, on the meta device: shapes, and no numbers.

    Args:
        file: which its configuration was read from, for errors.

    Raises:
        ValueError: its sizes are beyond any memory, or no model has such values.
        ImportError: it needs a package.
    """
    try:
        with torch.device("meta"):
            return build()
    except ImportError:
        raise
    except Exception as error:  # whatever a value raises that nobody expected
        where = "" if file is None else f"{file}: "
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{where}no model of this configuration can be: {kind}{in_one_line(error)}") from error


def check_fields(config_class: Any, names: Iterable[str]) -> None:
    """A ValueError that names the first which is not a field of the configuration, and what may have been meant."""
    known = {
        *getattr(config_class, "__dataclass_fields__", ()),
        *getattr(config_class, "attribute_map", ()),
        *ARGUMENTS,
        *TOKEN_IDS,
    }
    for name in names:
        if isinstance(names, Mapping) and names[name] is None:
            continue  # set to nothing, where settings are shared with a family that has it
        if name not in known and not isinstance(getattr(config_class, name, None), property):
            raise ValueError(f"config.{name}: {config_class.__name__} has no such field{_meant(name, known)}")


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], n=1)
    return f"; did you mean {close[0]}?" if close else "."
