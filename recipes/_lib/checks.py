"""Checks before a run starts, so that a wrong setting costs seconds and not hours, or a comparison of models that are
not of one size."""

import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Value
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_hybrid_ssm.cli.parsing import is_path
from hf_hybrid_ssm.hub.configurations import check_fields, without_memory
from hf_hybrid_ssm.hub.delta_files import remove_weights
from hf_hybrid_ssm.hub.verify_files import check_weights_if_local

CHECKPOINTS = "checkpoint-[0-9]*"

logger = logging.getLogger(__name__)


def is_first_process() -> bool:
    """Whether this process is the one that writes; the launchers number theirs."""
    return os.environ.get("RANK", "0") == "0"


def check_output(folder: str | Path, overwrite: bool, resume: str | None = None) -> None:
    """The folder may hold something only where a run is to be resumed or overwritten. Nothing is deleted yet: that is
    `clear_checkpoints`, when everything has been read.

    Raises:
        FileExistsError: it holds something; or with resume="auto" a model, but no checkpoint of its training.
        NotADirectoryError: it is a file.
    """
    folder = Path(folder)
    if folder.is_file():
        raise NotADirectoryError(f"output_dir={str(folder)!r} is a file; a folder was expected.")
    if overwrite or not folder.is_dir() or not any(folder.iterdir()):
        return
    if resume is None:
        raise FileExistsError(
            f"output_dir={str(folder)!r} is not empty: name another one, or give overwrite=true (or resume=auto, "
            "where the recipe knows it, to go on)."
        )
    if resume == "auto" and (folder / "config.json").is_file() and not any(folder.glob(CHECKPOINTS)):
        raise FileExistsError(
            f"output_dir={str(folder)!r} holds a model and no checkpoint to go on from: name another folder, or give "
            "overwrite=true to replace it."
        )


def clear_checkpoints(folder: str | Path, overwrite: bool, resume: str | None = None) -> None:
    """The checkpoints of an earlier run go where `overwrite` says so, so that nothing can be resumed from them.

    Called last before training, when data, tokenizer, model and configuration have been read: whatever is wrong with
    those costs nothing.
    """
    if overwrite and resume is None and is_first_process():
        for checkpoint in Path(folder).glob(CHECKPOINTS):
            shutil.rmtree(checkpoint)


def clear_weights(folder: str | Path, overwrite: bool) -> None:
    """The weights and adapters of an earlier run go where `overwrite` says so. Called just before the next are saved,
    since training may start from them."""
    if overwrite and is_first_process():
        remove_weights(Path(folder))


def check_either(arguments: Any, one: str, other: str) -> None:
    """One of two settings is given.

    Raises:
        ValueError: none or both are.
    """
    given = {name: getattr(arguments, name) for name in (one, other)}
    if bool(given[one]) == bool(given[other]):
        told = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"give either {one} or {other}, got {told}.")


def check_named(arguments: Any, *names: str) -> None:
    """Each of these settings names something.

    Raises:
        ValueError: one is empty.
    """
    for name in names:
        if not (value := getattr(arguments, name)):
            raise ValueError(f"{name}={value!r} must name at least one.")


def check_least(arguments: Any, least: int, *names: str) -> None:
    """Each of these settings is at least so much, or None.

    Raises:
        ValueError: one is less.
    """
    for name in names:
        if (value := getattr(arguments, name)) is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")


def check_known(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """A setting names nothing that is not there.

    Raises:
        ValueError: it does.
    """
    known = list(known)
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{name} names {unknown}, which are not among {known}.")


def check_config(model_type: str | None, fields: Mapping[str, Any], preset: str | None = None) -> None:
    """Family, size and fields of a new model exist.

    Raises:
        ValueError: names the one that does not.
    """
    if model_type is None:
        if fields or preset is not None:
            raise ValueError("config and preset describe a new model: give model_type, or leave them out.")
        return
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type={model_type!r} is not a family that transformers knows.")
    config_class = CONFIG_MAPPING[model_type]
    check_fields(config_class, fields)
    known = getattr(config_class, "presets", {})
    if preset is not None and preset not in known:
        have = ", ".join(map(repr, known)) or "none"
        raise ValueError(f"preset={preset!r}: {model_type} has {have}.")


def check_checkpoint(name: str, argument: str, auto_class: Any = None) -> PreTrainedConfig:
    """The configuration of a checkpoint that `auto_class` (such as `AutoModelForCausalLM`) can load; its weight files
    are complete. No code of it is executed.

    Raises:
        FileNotFoundError: a folder that is not there or holds no config.json.
        ValueError: a family that has no such model.
    """
    path = Path(name)
    if (path.is_dir() or is_path(name)) and not (path / "config.json").is_file():
        state = "which holds no config.json" if path.is_dir() else "but there is no such folder"
        raise FileNotFoundError(f"{argument} names {name!r}, {state}.")
    if not path.is_dir():
        logger.warning("%s: there is no folder %r here; the Hub is asked for a model of that name.", argument, name)
    check_weights_if_local(name)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if auto_class is not None and type(config) not in auto_class._model_mapping:
        raise ValueError(
            f"{argument}: {name!r} is a checkpoint of family {config.model_type!r}, which {auto_class.__name__} does "
            "not know."
        )
    return config


def check_models(models: Mapping[str, str | Sequence[str]]) -> None:
    """`check_checkpoint` of the language models that a setting `models` names, each by itself or several seeds."""
    for name, checkpoints in models.items():
        for checkpoint in [checkpoints] if isinstance(checkpoints, str) else checkpoints:
            check_checkpoint(checkpoint, f"models: {name!r}", AutoModelForCausalLM)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every token has an embedding.

    Raises:
        ValueError: the vocabulary of the configuration is smaller than the tokenizer's.
    """
    if model.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"vocab_size={model.config.vocab_size} is smaller than the tokenizer's {len(tokenizer)} tokens."
        )


def check_columns(rows: Any, columns: Sequence[str], where: str) -> None:
    """A data set has these columns.

    Raises:
        ValueError: some are not there.
    """
    if missing := sorted(set(columns) - set(rows.column_names)):
        raise ValueError(f"{where}: columns {missing} are not among the data's {rows.column_names}.")


def check_texts(rows: Dataset, columns: Sequence[str], where: str) -> None:
    """Every row has a text in these columns; an empty one is a text.

    Raises:
        ValueError: a column is not there, or holds something else; names the first row that has no text.
    """
    check_columns(rows, columns, where)
    for column in columns:
        kind = rows.features[column]
        if not isinstance(kind, Value) or kind.dtype not in ("string", "large_string"):
            shown = getattr(kind, "dtype", type(kind).__name__)
            raise ValueError(f"{where}: column {column!r} holds {shown}, not texts.")
        if rows.data.column(column).null_count:
            first = next(number for number, text in enumerate(rows[column]) if text is None)
            raise ValueError(f"{where}: column {column!r} holds null in row {first}; leave such rows out.")


def check_scores(scores: Any, where: str) -> None:
    """Every score is a number.

    Raises:
        ValueError: one is not.
    """
    for score in scores:
        if not isinstance(score, int | float) or isinstance(score, bool):
            raise ValueError(f"{where}: labels must be numbers, got {score!r}.")


def check_labels(labels: Any, num_labels: int, where: str) -> None:
    """Class numbers are 0 ... num_labels - 1.

    Raises:
        ValueError: some are not.
    """
    if wrong := [label for label in labels if not isinstance(label, int | np.integer) or isinstance(label, bool)][:1]:
        raise ValueError(
            f"{where}: labels must be class numbers 0 to {num_labels - 1}, got {wrong[0]!r}, which is not an integer."
        )
    labels = np.asarray(labels)
    if labels.size and (labels.min() < 0 or labels.max() >= num_labels):
        raise ValueError(
            f"{where}: labels run from {labels.min()} to {labels.max()}, but the task has {num_labels} classes."
        )


LARGEST_RATIO = 1.5


def size_of(config: PreTrainedConfig) -> int:
    """The parameters of its language model beside the embeddings and the head; no memory is taken for them."""
    model = without_memory(lambda: AutoModelForCausalLM.from_config(config))
    tables = [table for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None]
    left_out = {id(weight) for table in tables for weight in table.parameters()}
    return sum(weight.numel() for weight in model.parameters() if id(weight) not in left_out)


def difference_in_size(sizes: Mapping[str, int]) -> str | None:
    """One line about models of which the largest has over 1.5 times the parameters of the smallest; None if none has.

    Args:
        sizes: name → parameters.
    """
    small, large = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
    if sizes[large] <= LARGEST_RATIO * sizes[small]:
        return None
    return (
        f"not a comparison of models of one size: {large} has {sizes[large]:,} parameters beside the vocabulary's "
        f"tables, {sizes[large] / sizes[small]:.1f} times those of {small} ({sizes[small]:,})."
    )
