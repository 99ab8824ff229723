"""A teacher from anywhere: a folder, a name on the Hub, or a GGUF file."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_hybrid_ssm.extras import install_command
from hf_hybrid_ssm.hub.configurations import in_one_line
from hf_hybrid_ssm.hub.verify_files import check_weights_if_local
from hf_hybrid_ssm.hub.whole_models import load_whole
from hf_hybrid_ssm.upcycle.fused_teachers import FUSED, check_fused, unfused
from hf_hybrid_ssm.upcycle.teacher_weights import check_weights
from hf_hybrid_ssm.upcycle.teachers import check_teacher

logger = logging.getLogger(__name__)


def load_teacher(
    path_or_name: str | os.PathLike, dtype: torch.dtype | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A teacher that can be upcycled, in evaluation mode, and its tokenizer with its chat template.

    A Phi-3 is given as the Mistral that it is with its projections split.

    No code of the folder or repository is executed, and pickled weights are read as tensors alone. The weights of a
    GGUF file are unpacked: the teacher is what that file holds, not what it was quantized from.

    Args:
        path_or_name: a folder, a name on the Hub, or a `.gguf` file (needs the extra `gguf`).
        dtype: of the weights; by default as saved, and float32 for a GGUF file.
        options: further arguments of `from_pretrained`, such as `device_map`.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ImportError: the package `gguf` is missing.
        ValueError: files are incomplete, no tokenizer is there, or the model cannot be upcycled; says what is wrong.
    """
    place = _place(path_or_name)
    return _load_model(place, dtype, options), _load_tokenizer(place, path_or_name)


def load_teacher_model(
    path_or_name: str | os.PathLike, dtype: torch.dtype | None = None, **options: Any
) -> PreTrainedModel:
    """`load_teacher` without the tokenizer."""
    return _load_model(_place(path_or_name), dtype, options)


def load_tokenizer(path_or_name: str | os.PathLike) -> PreTrainedTokenizerBase:
    """`load_teacher` without the model."""
    return _load_tokenizer(_place(path_or_name), path_or_name)


def _load_tokenizer(place: dict[str, Any], path_or_name: str | os.PathLike) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(**place, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ValueError(f"teacher={str(path_or_name)!r} has no tokenizer: {in_one_line(error)}") from error


def _place(path_or_name: str | os.PathLike) -> dict[str, Any]:
    """What `from_pretrained` wants to know: where, and in a GGUF file which."""
    if not isinstance(path_or_name, str | os.PathLike):
        raise TypeError(f"teacher must be a path or a name on the Hub, not {type(path_or_name).__name__}.")
    path, name = Path(path_or_name), str(path_or_name)
    if path.is_dir():
        _check_folder(path)
        return {"pretrained_model_name_or_path": name}
    if path.is_file() or path.suffix == ".gguf":
        _check_gguf(path)
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if not _can_be_repository(name):
        raise FileNotFoundError(f"teacher={name!r}: there is no such folder or file.")
    logger.warning("teacher: there is no folder %r here; the Hub is asked for a model of that name.", name)
    return {"pretrained_model_name_or_path": name}


def _can_be_repository(name: str) -> bool:
    """Not a path, by its form or because the folder that it names before the slash is here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        instead = ""
        if files := sorted(path.glob("*.gguf")):
            instead = f"; give one of its GGUF files, such as {str(files[0])!r}"
        elif (path / "adapter_config.json").is_file():
            instead = ": it is an adapter; merge it into its model first (merge_and_unload of peft)"
        raise FileNotFoundError(f"teacher={str(path)!r} holds no config.json{instead}.")
    check_weights_if_local(path)


def _check_gguf(path: Path) -> None:
    """The file is complete, and what transformers reads of it is all that it says.

    Raises:
        FileNotFoundError, ImportError, ValueError: as of `load_teacher`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"teacher={str(path)!r}: there is no such file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(
                f"teacher={str(path)!r} is a file, but no GGUF file; a folder, a name or GGUF is expected."
            )
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"reading {path.name} needs gguf: {install_command('gguf')}") from error
    try:
        reader = GGUFReader(path)
    except Exception as error:  # numpy's, where an offset lies beyond the end
        raise ValueError(f"teacher={str(path)!r} is not a complete GGUF file: {in_one_line(error)}") from error
    scaled = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    scaled += [
        name
        for name, field in reader.fields.items()
        if name.endswith(".rope.scaling.type") and field.contents() != "none"
    ]
    if scaled:
        raise ValueError(
            f"teacher={str(path)!r} scales its rotary positions ({scaled[0]}), which transformers does not read from "
            "a GGUF file: give the folder of the model instead."
        )


def _load_model(place: dict[str, Any], dtype: torch.dtype | None, options: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(**place, trust_remote_code=False)
    is_fused = config.model_type in FUSED
    if is_fused:
        check_fused(config)
        if options.get("device_map") is not None:
            raise ValueError(
                f"device_map={options['device_map']!r} cannot be used with a {config.model_type} teacher, whose fused "
                "projections are split after it is loaded: leave it out."
            )
    else:
        check_teacher(config)
    wanted: Any = "auto" if dtype is None else dtype
    if "gguf_file" in place:
        wanted = torch.float32  # whichever float the blocks were of, so that versions of transformers agree
        if unpack := getattr(transformers, "GgufConfig", None):
            options = {"quantization_config": unpack(dequantize=True)} | options
    options = {"config": config, "dtype": wanted, "trust_remote_code": False} | options
    folder = place["pretrained_model_name_or_path"]
    named = {name: value for name, value in place.items() if name != "pretrained_model_name_or_path"}
    model = load_whole(AutoModelForCausalLM, folder, **named, **options)
    if "gguf_file" in place and dtype is not None:
        model.to(dtype)
    if is_fused:
        model = unfused(model)
    check_weights(model)
    return model.eval()
