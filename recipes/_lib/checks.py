"""Checks before a run starts, so that a wrong setting costs seconds and not hours."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def check_output(folder: str | Path, overwrite: bool, resume: str | None = None) -> None:
    """The folder may hold something only where a run is to be resumed or overwritten; an overwritten run's
    checkpoints go, so that nothing can be resumed from them.

    Raises:
        FileExistsError: it holds something.
    """
    folder = Path(folder)
    if resume is not None or not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(
            f"output_dir={str(folder)!r} is not empty: name another one, or give overwrite=true (or resume=auto, "
            "where the recipe knows it, to go on)."
        )
    for checkpoint in folder.glob("checkpoint-[0-9]*"):
        shutil.rmtree(checkpoint, ignore_errors=True)


def check_checkpoint(name: str, argument: str, auto_class: Any = None) -> PreTrainedConfig:
    """The configuration of a checkpoint that `auto_class` (such as `AutoModelForCausalLM`) can load.

    Raises:
        FileNotFoundError: a folder that is not there or holds no config.json.
        ValueError: a family that has no such model.
    """
    path = Path(name)
    is_folder = path.is_dir() or path.is_absolute() or name.startswith(".") or name.count("/") > 1
    if is_folder and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{argument} names {name!r}, which holds no config.json.")
    config = AutoConfig.from_pretrained(name)
    if auto_class is not None and type(config) not in auto_class._model_mapping:
        raise ValueError(
            f"{argument}: {name!r} is a checkpoint of family {config.model_type!r}, which {auto_class.__name__} does "
            "not know."
        )
    return config


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


def check_labels(labels: Any, num_labels: int, where: str) -> None:
    """Class numbers are 0 ... num_labels - 1.

    Raises:
        ValueError: some are not.
    """
    labels = np.asarray(labels)
    if labels.size and (labels.min() < 0 or labels.max() >= num_labels):
        raise ValueError(
            f"{where}: labels run from {labels.min()} to {labels.max()}, but the task has {num_labels} classes."
        )
