"""Does a folder hold the model that its config.json describes, and all of it?

Checks what safetensors and transformers do not: names, shapes and kinds of tensors, finite numbers, a tokenizer that
multiplies no text, counts that memory holds.

Of a folder with a model of transformers' own too, but for the names of tensors, which transformers may change as it
loads them (`load_whole` compares them then). Nothing that a folder names is fetched or run, nothing outside of it is
read, and nothing is unpickled.
"""

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hf_hybrid_ssm.hub.configurations import config_of_folder, without_memory
from hf_hybrid_ssm.hub.delta_files import DELTA, DELTA_WEIGHTS, is_delta, read_delta
from hf_hybrid_ssm.hub.fingerprint import fingerprint_of
from hf_hybrid_ssm.hub.one_line import few, in_one_line
from hf_hybrid_ssm.hub.reading import check_readable, check_regular, read_any_json, read_json, read_text
from hf_hybrid_ssm.hub.verify_files import ADAPTER_CONFIG, check_folder, tensors_of, weight_files, weights_name
from hf_hybrid_ssm.models import family_of

SUMS = "SHA256SUMS"
STUDENT = "hybrid_student"
GENERATION = "generation_config.json"
COUNTS, MOST_ROWS = ("num_beams", "num_beam_groups", "num_return_sequences"), 1024
FLOATING = ("BF16", "F16", "F32", "F64")
OTHERS = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.complex64: "C64",
}  # fmt: skip
SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")
MOST_GROWTH = 256  # letters for each letter of a text; the normalizer of T5 makes at most 36
MOST_PADDING = 1 << 20  # tokens
BYTES_OF_LETTER = 4  # a byte-level step writes a letter for each byte
STEPS = ("normalizer", "pre_tokenizer", "decoder")
PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
"""Files that transformers reads instead of those that are named as usual, whatever tensors they lack."""


def check_contents(folder: str | os.PathLike) -> dict[str, int]:
    """`check_folder`, and then: every JSON file is one, no weight file is left from another model, the tensors are
    those of the class in `config.json`, in name, shape and kind of number, the tokenizer's ids lie in the vocabulary,
    and `generate` can be called. Nothing in the folder is executed.

    Returns:
        What `check_folder` does.

    Raises:
        ValueError: names the file and says what is wrong with it.
    """
    where = Path(folder)
    counts = check_folder(where)
    for path in sorted(where.glob("*.json")):
        read_any_json(path)
    _check_leftovers(where)
    config = config_of_folder(where)
    if hasattr(config, "quantization_config"):
        raise ValueError(f"{where / 'config.json'}: quantized weights are not checked; from_pretrained loads them.")
    check_tensors(where, config)
    if is_delta(where):
        own_tensors(where)
    check_tokenizer(where, config)
    check_generation(where)
    return counts


def check_sums(folder: str | os.PathLike) -> int:
    """Every file that SHA256SUMS names has the hash that stands there.

    Returns:
        How many were compared; 0 without that file.

    Raises:
        ValueError: a file is missing or holds something else, or a line names no file of the folder.
    """
    where = Path(folder)
    if not os.path.lexists(where / SUMS):
        return 0
    lines = read_text(where / SUMS).splitlines()
    for number, line in enumerate(lines, 1):
        stated = SUM.fullmatch(line)
        if stated is None or Path(stated[2]).name != stated[2]:
            raise ValueError(f"{where / SUMS}, line {number}: a SHA-256 and the name of a file here were expected.")
        path = where / stated[2]
        if not os.path.lexists(path):
            raise ValueError(f"{path} is missing, which {SUMS} names.")
        check_regular(path)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != stated[1]:
                raise ValueError(f"{path} is not the file that {SUMS} names: its SHA-256 is another.")
    return len(lines)


def check_values(folder: str | os.PathLike, progress: Callable[[Iterable[str]], Iterable[str]] = iter) -> int:
    """Every number of the weights is finite; reads all of them, one tensor at a time.

    Args:
        progress: wraps the names of each file's tensors, as `tqdm` does.

    Returns:
        How many numbers there are.

    Raises:
        ValueError: names the file and the first tensor with NaN or infinite numbers, and how many.
    """
    where, count = Path(folder), 0
    for file, tensors in tensors_of(where).items():
        with safe_open(where / file, framework="pt") as weights:
            for name in progress(tensors):
                tensor = weights.get_tensor(name)
                count += tensor.numel()
                if not tensor.is_floating_point():
                    continue
                finite = int(tensor.float().isfinite().sum())
                if finite < tensor.numel():
                    bad = tensor.numel() - finite
                    raise ValueError(f"{where / file}: {name} holds {bad:,} NaN or infinite numbers.")
    return count


def _check_leftovers(folder: Path) -> None:
    """Weights that `from_pretrained` does not read, because others are there."""
    used = {*tensors_of(folder), weights_name(folder)}
    patterns = ("model*.safetensors", SAFE_WEIGHTS_INDEX_NAME, "pytorch_model*.bin")
    files = {path.name for pattern in patterns for path in folder.glob(pattern)}
    if foreign := sorted(files - used):
        raise ValueError(
            f"{folder / foreign[0]} is left from another save: the weights of this checkpoint are in "
            f"{', '.join(sorted(used))}."
        )


def own_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a delta that are not its teacher's, by name.

    Raises:
        ValueError: they are not those that were saved with `delta.json`: a number or a name is another.
    """
    own, delta = load_file(folder / DELTA_WEIGHTS), read_delta(folder)
    if fingerprint_of(own) != delta.digest:
        raise ValueError(
            f"{folder / DELTA_WEIGHTS} and {DELTA} are not what was saved: the name or a number of a tensor is "
            "another. Copy both again."
        )
    return own


def check_tensors(folder: Path, config: Any) -> dict[str, tuple[int, ...]]:
    """The weights are those of the class in `config.json`, in name and shape; of a delta, with what carries over.

    Returns:
        The shapes of that class's tensors, by name, but for tied ones.

    Raises:
        ValueError: names the file and a tensor.
    """
    architecture = next(iter(config.architectures or []), "")
    family = family_of(config.model_type)
    if architecture not in family.heads.values():
        known = ", ".join(dict.fromkeys(family.heads.values()))
        raise ValueError(
            f"{folder / 'config.json'} names the architecture {architecture!r}, but {config.model_type!r} has {known}."
        )
    model = without_memory(lambda: family.load(architecture)(config), folder / "config.json")
    expected = model.state_dict()
    places = tensors_of(folder)
    saved = {name: tensor for tensors in places.values() for name, tensor in tensors.items()}
    file_of = {name: folder / file for file, tensors in places.items() for name in tensors}
    carried = _of_teacher(folder, config) if is_delta(folder) else set()
    if missing := sorted(expected.keys() - saved.keys() - _tied(model) - carried):
        raise ValueError(f"{folder}: no weight file holds {few(missing)}, which {architecture} needs.")
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    foreign = saved.keys() - expected.keys()
    if foreign := sorted(name for name in foreign if not any(pattern.search(name) for pattern in ignored)):
        raise ValueError(f"{file_of[foreign[0]]} holds {few(foreign)}, which {architecture} does not have.")
    for name in sorted(expected.keys() & saved.keys()):
        (shape, dtype), wanted = saved[name], expected[name]
        if shape != tuple(wanted.shape):
            raise ValueError(
                f"{file_of[name]}: {name} has shape {shape}, but {architecture} needs {tuple(wanted.shape)}."
            )
        check_dtype(file_of[name], name, dtype, wanted.dtype, architecture)
    return {name: tuple(tensor.shape) for name, tensor in expected.items() if name not in _tied(model)}


def _of_teacher(folder: Path, config: Any) -> set[str]:
    """The names of the tensors of a student's teacher."""
    from hf_hybrid_ssm.students.teacher import class_of

    if config.model_type != STUDENT:
        raise ValueError(f"a delta is of a student, and config.json is of a {config.model_type!r}.")
    teacher_class, file = class_of(config.teacher_type), folder / "config.json"
    return set(without_memory(lambda: teacher_class(config.teacher_config()), file).state_dict())


def _tied(model: PreTrainedModel) -> set[str]:
    return set(getattr(model, "all_tied_weights_keys", None) or {})


def check_generation(folder: Path) -> None:
    """`generate` can be called with the settings of generation_config.json, whose counts memory can hold.

    Raises:
        ValueError: it cannot.
    """
    if not os.path.lexists(folder / GENERATION):
        return
    saved = read_json(folder / GENERATION)
    for name in COUNTS:
        if isinstance(value := saved.get(name), int) and value > MOST_ROWS:
            raise ValueError(f"{folder / GENERATION}: {name}={value} is beyond {MOST_ROWS:,}, the most that is read.")
    try:
        GenerationConfig.from_pretrained(folder).validate()
    except Exception as error:  # whatever a value raises that nobody expected
        raise ValueError(f"{folder / GENERATION}: {in_one_line(error)}") from error


def check_dtype(file: Path, name: str, stored: str, wanted: torch.dtype, model: str) -> None:
    """Numbers of a stored dtype are of the kind that a tensor of the model holds: transformers converts any to any.

    Raises:
        ValueError: they are not.
    """
    allowed = FLOATING if wanted.is_floating_point else (OTHERS.get(wanted),)
    if stored not in allowed:
        needed = ", ".join(map(str, allowed))
        raise ValueError(f"{file}: {name} has dtype {stored}, but {model} needs {needed}.")


def check_tokenizer(folder: Path, config: Any) -> None:
    """The tokenizer can be loaded, its steps multiply no text, and its tokens are those of the model's vocabulary; a
    folder without tokenizer.json passes.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    check_steps(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        ids = [*tokenizer.get_vocab().values(), *tokenizer("a")["input_ids"]]
        tokens = max(len(tokenizer), *(number + 1 for number in ids))
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ValueError(f"{file} holds no tokenizer: {in_one_line(error)}") from error
    if tokens > config.vocab_size:
        raise ValueError(
            f"{file} has {tokens} tokens, but the model's vocab_size is {config.vocab_size}: it belongs to another "
            "model."
        )


def check_steps(file: Path) -> None:
    """The steps of a tokenizer.json multiply no text.

    Raises:
        ValueError: one does, or cannot be read.
    """
    saved = read_json(file)
    for step in STEPS:
        try:
            growth = _growth(saved.get(step))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{file} holds no tokenizer: its {step} cannot be read.") from error
        if growth > MOST_GROWTH:
            raise ValueError(
                f"{file}: its {step} can make more than {MOST_GROWTH} letters of each letter of a text, which no "
                "tokenizer needs."
            )
    padding = saved["padding"] if isinstance(saved.get("padding"), dict) else {}
    strategy = padding["strategy"] if isinstance(padding.get("strategy"), dict) else {}
    for size in (strategy.get("Fixed"), padding.get("pad_to_multiple_of")):
        if isinstance(size, int) and size > MOST_PADDING:
            raise ValueError(f"{file} pads each text to {size:,} tokens; at most {MOST_PADDING:,} are made.")


def _growth(step: Any) -> float:
    """A bound of how many letters a step of the tokenizer makes of one; infinite once it is beyond use."""
    if step is None:
        return 1
    parts = step.get("normalizers") or step.get("pretokenizers") or step.get("decoders")
    if parts is not None:
        growth = 1.0
        for part in parts:
            growth = min(growth * _growth(part), float("inf"))
        return growth
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), len(step.get("content"))
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1, content / len(plain)) if plain else 1 + content  # a regular expression may match nothing
    if kind == "Prepend":
        return 1 + len(step.get("prepend"))
    if kind == "Precompiled":  # a trie, after its size, and then what it puts in place, divided by zeros
        table = base64.b64decode(step.get("precompiled_charsmap"))
        start = 4 + int.from_bytes(table[:4], "little")
        return max(1, *map(len, table[start:].split(b"\0")), 1)
    if kind == "ByteLevel":
        return BYTES_OF_LETTER
    if kind == "BertNormalizer":  # spaces on both sides of a Chinese letter
        return 3
    return 1


def check_texts(folder: Path) -> PreTrainedConfig:
    """The configuration of a folder all of whose texts can be read: it names no code, asks for no more than can be
    built, and no other model; the tokenizer's steps multiply no text.

    Raises:
        ValueError: names the file and says what is wrong with it.
    """
    config = config_of_folder(folder, of_transformers=True)
    check_readable(folder)
    for path in sorted(folder.glob("*.json")):
        read_any_json(path)
    if (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} is an adapter beside a model: merge it into the model (merge_and_unload of "
            "peft) and save that."
        )
    if (folder / "tokenizer.json").is_file():
        check_steps(folder / "tokenizer.json")
    check_generation(folder)
    return config


def check_safetensors(folder: Path, config: Any) -> None:
    """The weights are complete safetensors, and hold numbers of the kind that the causal language model needs.

    Raises:
        ValueError: names the file or the tensor.
    """
    names = sorted(path.name for path in folder.iterdir())
    if shards := [name for name in names if SHARD.fullmatch(name)]:
        raise ValueError(
            f"{folder / shards[0]} is a part of a checkpoint that several processes saved: load it there, and save it "
            "whole."
        )
    first = next(iter(weight_files(folder)))
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if first not in names and pickled:
        raise ValueError(
            f"{folder / pickled[0]} holds pickled weights, which are not read: load them where you trust them, and "
            "save the model as safetensors (save_pretrained)."
        )
    places = tensors_of(folder)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or getattr(config, "quantization_config", None) is not None:
        return
    expected = without_memory(lambda: model_class(config), folder / "config.json").state_dict()
    for file, tensors in places.items():
        for name in sorted(expected.keys() & tensors.keys()):
            check_dtype(folder / file, name, tensors[name][1], expected[name].dtype, model_class.__name__)
