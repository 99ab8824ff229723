"""A model of the Hub as a folder of its cache: first what can be read and checked at once, then the weights."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_hybrid_ssm.hub.one_line import in_one_line
from hf_hybrid_ssm.hub.verify_files import weight_files

TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configurations, templates and tokenizers. Never code, nor pickled files."""
OPTIONS = ("revision", "token", "cache_dir", "local_files_only")


def is_name(name: str) -> bool:
    """Whether the Hub can have a model of this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def download_texts(name: str, **options: Any) -> Path:
    """The folder with all of a model but its weights.

    Args:
        options: of `OPTIONS`.

    Raises:
        ValueError: the Hub can have no such name.
        OSError: there is no such model, or it was not downloaded.
    """
    if not is_name(name):
        raise ValueError(f"{name!r} is no name on the Hub, which is as in USER/MODEL.")
    return _downloaded(name, TEXTS, options)


def download_weights(name: str, folder: Path, **options: Any) -> None:
    """Bring the safetensors that the index of `download_texts` names, or model.safetensors, into that folder.

    Raises:
        ValueError: the index names other files.
        OSError: they were not downloaded.
    """
    files = weight_files(folder)
    if any(not (folder / file).is_file() for file in files):
        _downloaded(name, tuple(files), options | {"revision": folder.name})  # the commit that was checked


def _downloaded(name: str, patterns: tuple[str, ...], options: dict[str, Any]) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), **options))
    except Exception as error:  # of requests, files and validation
        raise OSError(f"{name!r} was not downloaded from the Hub: {in_one_line(error)}") from error
