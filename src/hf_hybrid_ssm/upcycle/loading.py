"""A teacher from anywhere: a folder, a name on the Hub, or a GGUF file."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_hybrid_ssm.hub.configurations import in_one_line, without_memory
from hf_hybrid_ssm.hub.gguf_config import config_fields
from hf_hybrid_ssm.hub.gguf_header import GgufHeader, read_header
from hf_hybrid_ssm.hub.verify_files import check_weights_if_local
from hf_hybrid_ssm.hub.whole_models import load_whole
from hf_hybrid_ssm.upcycle.fused_teachers import FUSED, check_fused, unfused
from hf_hybrid_ssm.upcycle.teacher_weights import check_weights
from hf_hybrid_ssm.upcycle.teachers import check_teacher

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeacherFiles:
    """A causal language model of transformers whose files were checked and whose weights have not been read.

    Attributes:
        source: the folder, name or file, as it was given.
        config: its configuration.
        header: of a GGUF file; else None.
    """

    source: str
    config: Any
    header: GgufHeader | None = None

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer with its chat template.

        Raises:
            ValueError: there is none, or none that is read.
        """
        if self.header is not None:
            from hf_hybrid_ssm.hub.gguf_tokenizer import tokenizer_of

            return tokenizer_of(self.header)
        try:
            return AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare exceptions
            raise ValueError(f"teacher={self.source!r} has no tokenizer: {in_one_line(error)}") from error

    def load_model(self, dtype: torch.dtype | None = None, **options: Any) -> PreTrainedModel:
        """The model in evaluation mode, each of its weights from the files, and each of theirs in it.

        Args:
            dtype: of the weights; by default as saved, and float32 for a GGUF file.
            options: further arguments of `from_pretrained`, such as `device_map`.

        Raises:
            ValueError: names a tensor that is missing, beyond the model, or of another shape.
        """
        options = {"trust_remote_code": False, "config": self.config} | options
        if self.header is None:
            options |= {"dtype": "auto" if dtype is None else dtype}
            return load_whole(AutoModelForCausalLM, self.source, **options).eval()
        from hf_hybrid_ssm.hub.gguf_weights import weights_of

        dtype = dtype or torch.float32
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        empty = without_memory(lambda: model_class(self.config))
        shapes = {name: value.shape for name, value in empty.state_dict().items()}
        options |= {"dtype": dtype, "state_dict": weights_of(self.header, self.config, shapes, dtype)}
        options |= {"generation_config": GenerationConfig.from_model_config(self.config)}
        model = load_whole(model_class, None, **options)
        model.name_or_path = model.config.name_or_path = self.source
        return model.eval()


def open_teacher(path_or_name: str | os.PathLike) -> TeacherFiles:
    """The files of a causal language model, checked, before any of its weights is read.

    No code of the folder or repository is executed. The weights of a GGUF file are unpacked: the model is what that
    file holds, not what it was quantized from.

    Args:
        path_or_name: a folder, a name on the Hub, or a `.gguf` file (needs the extra `gguf`).

    Raises:
        FileNotFoundError: there is no such folder or file.
        ImportError: the package `gguf` is missing.
        ValueError: files are incomplete or say what is not read; names it.
    """
    if not isinstance(path_or_name, str | os.PathLike):
        raise TypeError(f"teacher must be a path or a name on the Hub, not {type(path_or_name).__name__}.")
    path, name = Path(path_or_name), str(path_or_name)
    if path.is_file() or path.suffix == ".gguf":
        header = read_header(path)
        fields = config_fields(header)
        header.check_complete()
        return TeacherFiles(name, AutoConfig.for_model(**fields), header)
    if path.is_dir():
        _check_folder(path)
    elif not _can_be_repository(name):
        raise FileNotFoundError(f"teacher={name!r}: there is no such folder or file.")
    else:
        logger.warning("teacher: there is no folder %r here; the Hub is asked for a model of that name.", name)
    return TeacherFiles(name, AutoConfig.from_pretrained(name, trust_remote_code=False))


def load_teacher(
    teacher: str | os.PathLike | TeacherFiles, dtype: torch.dtype | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A teacher that can be upcycled, in evaluation mode, and its tokenizer with its chat template.

    A Phi-3 is given as the Mistral that it is with its projections split.

    Args:
        teacher: as of `open_teacher`, or what that gives.
        dtype, options: as of `TeacherFiles.load_model`.

    Raises:
        FileNotFoundError, ImportError: as of `open_teacher`.
        ValueError: files are incomplete, no tokenizer is there, or the model cannot be upcycled; says what is wrong.
    """
    files = _opened(teacher)
    tokenizer = files.load_tokenizer()
    return load_teacher_model(files, dtype, **options), tokenizer


def load_teacher_model(
    teacher: str | os.PathLike | TeacherFiles, dtype: torch.dtype | None = None, **options: Any
) -> PreTrainedModel:
    """`load_teacher` without the tokenizer."""
    files = _opened(teacher)
    is_fused = files.config.model_type in FUSED
    if is_fused and options.get("device_map") is not None:
        raise ValueError(
            f"device_map={options['device_map']!r} cannot be used with a {files.config.model_type} teacher, whose "
            "fused projections are split after it is loaded: leave it out."
        )
    model = files.load_model(dtype, **options)
    if is_fused:
        model = unfused(model)
    check_weights(model)
    return model.eval()


def _opened(teacher: str | os.PathLike | TeacherFiles) -> TeacherFiles:
    """The files of a teacher that can be upcycled, as far as its configuration says."""
    files = teacher if isinstance(teacher, TeacherFiles) else open_teacher(teacher)
    (check_fused if files.config.model_type in FUSED else check_teacher)(files.config)
    return files


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
