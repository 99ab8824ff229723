"""Checkpoints that carry their code, for people who have only transformers and torch."""

import json
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_hybrid_ssm import __version__
from hf_hybrid_ssm.hub.configurations import config_of_folder
from hf_hybrid_ssm.hub.delta_files import is_delta
from hf_hybrid_ssm.hub.flatten import flatten
from hf_hybrid_ssm.hub.reading import check_readable
from hf_hybrid_ssm.hub.sources import needed_modules
from hf_hybrid_ssm.hub.verify_files import is_as_exported, read_config, seal
from hf_hybrid_ssm.hub.writing import write_whole
from hf_hybrid_ssm.layers.mixers.registry import BUILT_IN
from hf_hybrid_ssm.models import family_of, owner_of
from hf_hybrid_ssm.models.family import Family

logger = logging.getLogger(__name__)

HEAD = (
    "# Copyright 2026 The hf-hybrid-ssm contributors.\n"
    "# SPDX-License-Identifier: Apache-2.0\n"
    f"# Part of hf-hybrid-ssm {__version__}, gathered by hf_hybrid_ssm.hub.export_code.\n"
    "# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers\n"
    "# takes the package instead when it is installed.\n"
)
NAMED = (
    "# transformers copies the files that a file names; a configuration that is saved alone brings its models along\n"
    "if TYPE_CHECKING:"
)
# beside what models import, and what is done with it at the end of their file
BESIDE = ("hf_hybrid_ssm.tested_versions", "hf_hybrid_ssm.hub.loaded_layers")
AT_THE_END = "\nwarn_of_untested_transformers(transformers.__version__)\nHOOKS.load = load_layers\n"


def export_code(model_or_folder: PreTrainedModel | str | os.PathLike, folder: str | os.PathLike | None = None) -> Path:
    """Add to a saved checkpoint the code that loads it with `trust_remote_code=True`, without this package.

    Writes at most 15 Python files, each with its hash in its first lines, and the `auto_map` of every head into
    `config.json`. The same package writes the same bytes. `model.save_pretrained(folder, export_code=True)` saves and
    does this in one call.

    Args:
        model_or_folder: a model of this package, or the folder of a saved one.
        folder: where the model was saved; not needed when the first argument says it.

    Returns:
        The folder.

    Raises:
        ValueError: nothing was saved there, or a file is not to be read; it is not a family of this package, its
            configuration holds what it may not, or transformers has a model type of that name itself; or there are
            Python files that this function did not write. Nothing has been written then.
    """
    model = model_or_folder if isinstance(model_or_folder, PreTrainedModel) else None
    if model is None and not isinstance(model_or_folder, str | os.PathLike):
        raise TypeError(f"model_or_folder must be a model or a path, not {type(model_or_folder).__name__}.")
    paths = {Path(path) for path in (model_or_folder, folder) if isinstance(path, str | os.PathLike)}
    if len(paths) != 1:
        raise ValueError(f"folder is needed, and one only: where was the model saved? Got {sorted(map(str, paths))}.")
    target = paths.pop()
    if is_delta(target):
        raise ValueError(f"{target} is a delta, which loads with this package alone: export the whole model (--full).")
    config = read_config(target)
    check_readable(target)
    model_type = config_of_folder(target).model_type
    check_exportable(model_type, model, target)
    write_code(target, model_type)
    config["auto_map"] = auto_map_of(model_type)
    write_whole(target / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    return target


def write_code(folder: str | os.PathLike, model_type: str) -> None:
    """Write the code of a model type into a folder that exists.

    This also happens whenever a model that carries its code is saved, for instance at the end of a long training run.
    So a file of the same name that was not exported stays as it is, and a warning is logged; `export_code` refuses it.
    """
    for name, text in code_of(model_type).items():
        path = Path(folder) / name
        if path.is_file() and not is_as_exported(path):
            logger.warning("%s was not written by export_code, or was changed since; it stays as it is.", path)
        else:
            write_whole(path, text)


def choose_code(model: Any, export_code: bool, folder: str | os.PathLike | None) -> None:
    """Whether a model is saved with its code, by the `auto_map` of its configuration; in a folder that is known.

    Raises:
        ValueError: as of `check_exportable`; or its class was defined outside of this package.
    """
    config = model.config
    if not _is_ours(config):
        if export_code and getattr(config, "auto_map", None) is None:
            raise ValueError(
                f"export_code=True: {type(config).__name__} was defined outside of hf_hybrid_ssm, and only the code "
                "of this package is exported."
            )
    elif export_code:
        check_exportable(config.model_type, model, folder)
        config.auto_map = auto_map_of(config.model_type)
    elif hasattr(config, "auto_map"):
        del config.auto_map


def save_configuration(
    config: Any, usual: Callable[..., None], folder: str | os.PathLike, push_to_hub: bool = False, **options: Any
) -> None:
    """`save_pretrained` of a configuration with an `auto_map`, with the code that it names where that is ours."""
    if not _is_ours(config):
        usual(folder, push_to_hub=push_to_hub, **options)
        return
    config.auto_map = auto_map_of(config.model_type)
    usual(folder)
    write_code(folder, config.model_type)
    if push_to_hub:
        config.push_to_hub(options.pop("repo_id", Path(folder).name), **options)


def _is_ours(config: Any) -> bool:
    """Whether its class is this package's own, and not derived elsewhere."""
    return type(config).__module__.startswith("hf_hybrid_ssm.")


def check_exportable(model_type: str, model: PreTrainedModel | None, folder: str | os.PathLike | None) -> None:
    """A ValueError if a model is not of that family, or the folder has Python files that were not exported."""
    family = _exportable(model_type)
    made_here = model is not None and type(model).__module__.startswith(f"{family.package}.")  # as a student's class
    if model is not None and type(model).__name__ not in family.names and not made_here:
        raise ValueError(f"{type(model).__name__} is not a class of the family {family.model_type!r}.")
    ssm_type = getattr(getattr(model, "config", None), "ssm_type", None)
    if ssm_type is None and folder is not None and (Path(folder) / "config.json").is_file():
        ssm_type = read_config(Path(folder)).get("ssm_type")
    if ssm_type not in (None, *BUILT_IN):
        raise ValueError(f"ssm_type={ssm_type!r} is a mixer registered from outside, whose code is not exported.")
    for path in sorted(Path(folder).glob("*.py")) if folder is not None else ():
        if not is_as_exported(path):
            raise ValueError(
                f"{path} was not written by export_code, or was changed since; move it away, or export to a folder of "
                "its own."
            )


@cache
def code_of(model_type: str) -> dict[str, str]:
    """File name → source of everything that the classes of a model type need."""
    family = _exportable(model_type)
    modules = needed_modules(sorted({family.module_of[name] for name in family.names} | {*BESIDE}))
    own, own_level = _file_of_class(family, family.config), family.package.split(".")[1]

    def file_of(module: str) -> str:
        _, level, *rest = module.split(".")
        if level == "ops":  # a file for each op, and one for what they share
            return "dispatch" if rest[0] == "core" else rest[0]
        if level == "layers":
            return "mixers" if rest[0] == "mixers" else "layers"
        if level == "students":
            return rest[0] if rest[0] in ("configuration", "modeling") else "student_parts"
        if level == "models" and len(rest) == 1:  # all configurations, and what they share, are one file
            return own if rest[0].endswith("configuration") else "model_parts"
        if not rest or level == "hub":  # `BESIDE`
            return "model_parts"
        if own_level == "students":  # theirs are the memories of the families
            return "memories"
        if rest[-1].startswith("configuration"):
            return own
        return rest[-1] if rest[-1].startswith("modeling") else f"layers_{rest[0]}"

    texts = flatten(modules, file_of)
    texts["model_parts"] += AT_THE_END
    heads = dict(place.split(".") for place in auto_map_of(model_type).values() if not place.startswith(f"{own}."))
    named = "\n".join(f"    from .{file} import {name}  # noqa: F401" for file, name in sorted(heads.items()))
    texts[own] = f"from typing import TYPE_CHECKING\n\n{texts[own]}\n\n{NAMED}\n{named}\n"
    return {f"{name}.py": seal(HEAD, texts[name]) for name in sorted(texts)}


def auto_map_of(model_type: str) -> dict[str, str]:
    """Auto class → file and class, as `config.json` holds it."""
    family = _exportable(model_type)
    classes = {"AutoConfig": family.config} | {auto_class_of(table): name for table, name in family.heads.items()}
    return {auto: f"{_file_of_class(family, name)}.{name}" for auto, name in classes.items()}


@cache
def auto_class_of(table: str) -> str:
    """The name of the Auto class that reads a mapping of transformers, such as "MODEL_FOR_CAUSAL_LM"."""
    mapping = getattr(modeling_auto, f"{table}_MAPPING")
    autos = {name: getattr(auto, "_model_mapping", None) for name, auto in vars(modeling_auto).items()}
    return next(name for name, read in autos.items() if name.startswith("AutoModel") and read is mapping)


def _file_of_class(family: Family, name: str) -> str:
    return family.module_of[name].rsplit(".", 1)[1]


def _exportable(model_type: str) -> Family:
    family = family_of(model_type)
    if not family.is_ours:
        raise ValueError(f"model_type={model_type!r} was registered from outside, and its code is not exported.")
    if owner := owner_of(family):
        raise ValueError(
            f"transformers has a model type {model_type!r} of its own ({owner}); code exported under that name would "
            "shadow it."
        )
    return family
