"""A teacher from anywhere: a folder, a name on the Hub, or a GGUF file."""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
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
from hf_hybrid_ssm.hub.downloads import OPTIONS, download_texts, download_weights, is_name
from hf_hybrid_ssm.hub.gguf_config import config_fields
from hf_hybrid_ssm.hub.gguf_header import GgufHeader, read_header
from hf_hybrid_ssm.hub.verify import check_safetensors, check_texts
from hf_hybrid_ssm.hub.whole_models import load_whole
from hf_hybrid_ssm.upcycle.teacher import Teacher, check_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeacherFiles:
    """A causal language model of transformers whose files were checked and whose weights have not been read.

    Attributes:
        source: the folder, name or file, as it was given.
        config: its configuration.
        place: the folder, of the Hub's cache for a name; or what stands at the head of a GGUF file.
        is_on_hub: its weights may still have to be downloaded, with these `options`.
    """

    source: str
    config: Any
    place: Path | GgufHeader
    is_on_hub: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer with its chat template.

        Raises:
            ValueError: there is none, or none that is read.
        """
        if isinstance(self.place, GgufHeader):
            from hf_hybrid_ssm.hub.gguf_tokenizer import tokenizer_of

            return tokenizer_of(self.place)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.place, config=self.config, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare exceptions
            raise ValueError(f"teacher={self.source!r} has no tokenizer: {in_one_line(error)}") from error
        tokenizer.name_or_path = self.source
        return tokenizer

    def load_model(self, dtype: torch.dtype | None = None, **options: Any) -> PreTrainedModel:
        """The model in evaluation mode, each of its weights from the files, and each of theirs in it.

        Args:
            dtype: of the weights; by default as saved, and float32 for a GGUF file.
            options: further arguments of `from_pretrained`, such as `device_map`.

        Raises:
            ValueError: names a tensor that is missing, beyond the model, or of another shape.
        """
        if isinstance(self.place, GgufHeader):
            model = self._of_gguf(self.place, dtype or torch.float32, options)
        else:
            if self.is_on_hub:
                download_weights(self.source, self.place, **self.options)
            check_safetensors(self.place, self.config)
            own = {"config": self.config, "trust_remote_code": False, "use_safetensors": True}
            own["dtype"] = "auto" if dtype is None else dtype
            model = load_whole(AutoModelForCausalLM, self.place, **own | options)
        model.name_or_path = model.config.name_or_path = self.source
        return model.eval()

    def _of_gguf(self, header: GgufHeader, dtype: torch.dtype, options: dict[str, Any]) -> PreTrainedModel:
        from hf_hybrid_ssm.hub.gguf_weights import weights_of

        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        empty = without_memory(lambda: model_class(self.config))
        shapes = {name: value.shape for name, value in empty.state_dict().items()}
        own = {
            "config": self.config,
            "dtype": dtype,
            "generation_config": GenerationConfig.from_model_config(self.config),
        }
        return load_whole(
            model_class, None, state_dict=weights_of(header, self.config, shapes, dtype), **own | options
        )


def open_teacher(path_or_name: str | os.PathLike, on_hub: bool = False, **options: Any) -> TeacherFiles:
    """The files of a causal language model, checked, before any of its weights is read.

    No code of the folder or repository is executed, nothing that its files name is fetched, nothing outside of it is
    read, and nothing is unpickled. The model of a GGUF file is what that file holds, not what it was quantized from.

    Args:
        path_or_name: a folder, a name on the Hub, or a `.gguf` file (needs the extra `gguf`).
        on_hub: it is a name on the Hub, and never a path.
        options: for the Hub: `revision`, `token`, `cache_dir`, `local_files_only`.

    Raises:
        FileNotFoundError: there is no such folder or file.
        OSError: the Hub does not give it.
        ImportError: the package `gguf` is missing.
        ValueError: files are incomplete or say what is not read; names it.
    """
    if not isinstance(path_or_name, str | os.PathLike):
        raise TypeError(f"teacher must be a path or a name on the Hub, not {type(path_or_name).__name__}.")
    path, name = Path(path_or_name), str(path_or_name)
    if not on_hub and (path.is_file() or path.suffix == ".gguf"):
        header = read_header(path)
        fields = config_fields(header)
        header.check_complete()
        try:
            return TeacherFiles(name, AutoConfig.for_model(**fields), header)
        except Exception as error:  # whatever sizes raise that do not fit each other
            raise ValueError(f"teacher={name!r}: {in_one_line(error)}") from error
    if not on_hub and path.is_dir():
        _check_has_model(path)
        config = check_texts(path)
        check_safetensors(path, config)
        return TeacherFiles(name, config, path)
    if not on_hub:
        if not is_name(name) or ("/" in name and path.parent.is_dir()):
            raise FileNotFoundError(f"teacher={name!r}: there is no such folder or file.")
        logger.warning("teacher: there is no folder %r here; the Hub is asked for a model of that name.", name)
    path = download_texts(name, **options)
    _check_has_model(path)
    return TeacherFiles(name, check_texts(path), path, True, options)


def load_teacher(
    source: str | os.PathLike | TeacherFiles, dtype: torch.dtype | None = None, **options: Any
) -> Teacher:
    """A teacher with its tokenizer, in evaluation mode; refused by its configuration before its weights are read.

    Args:
        source: as of `open_teacher`, or what that gives.
        dtype, options: as of `TeacherFiles.load_model`; and the options of `open_teacher`.

    Raises:
        FileNotFoundError, OSError, ImportError: as of `open_teacher`.
        ValueError: files are incomplete, no tokenizer is there, or the model cannot be upcycled; says what is wrong.
    """
    tokenizer, model, files = _loaded(source, dtype, options, True)
    return Teacher(model, tokenizer, files.source, is_as_saved=dtype is None)


def weights_as_saved(source: str | os.PathLike | TeacherFiles) -> dict[str, torch.Tensor]:
    """All tensors of a teacher in the type that they were saved in; needs no tokenizer."""
    _, model, files = _loaded(source, None, {}, False)
    return Teacher(model, None, files.source).model.state_dict()


def _loaded(source: Any, dtype: torch.dtype | None, options: dict[str, Any], with_tokenizer: bool) -> tuple:
    of_hub = {name: value for name, value in options.items() if name in OPTIONS}
    files = source if isinstance(source, TeacherFiles) else open_teacher(source, **of_hub)
    check_config(files.config)
    tokenizer = files.load_tokenizer() if with_tokenizer else None
    others = {name: value for name, value in options.items() if name not in OPTIONS}
    return tokenizer, files.load_model(dtype, **others), files


def _check_has_model(path: Path) -> None:
    if os.path.lexists(path / "config.json"):
        return
    instead = ""
    if files := sorted(path.glob("*.gguf")):
        instead = f"; give one of its GGUF files, such as {str(files[0])!r}"
    elif (path / "adapter_config.json").is_file():
        instead = ": it is an adapter; merge it into its model first (merge_and_unload of peft)"
    raise FileNotFoundError(f"teacher={str(path)!r} holds no config.json{instead}.")
