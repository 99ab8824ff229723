"""Does a checkpoint folder hold the model that its config.json describes, and all of it?"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_hybrid_ssm.auto import family_of
from hf_hybrid_ssm.hub.configurations import config_of_folder, without_memory
from hf_hybrid_ssm.hub.delta_files import check_carried, is_delta, read_delta
from hf_hybrid_ssm.hub.verify_files import check_folder, shapes_of

SUMS = "SHA256SUMS"
SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def check_contents(folder: str | os.PathLike) -> dict[str, int]:
    """`check_folder`, and then: every JSON file is one, no weight file is left from another model, the tensors are
    those of the class in `config.json`, in name and shape, and the tokenizer's ids lie in the vocabulary. Nothing in
    the folder is executed.

    Returns:
        What `check_folder` does.

    Raises:
        ValueError: names the file and says what is wrong with it.
    """
    where = Path(folder)
    counts = check_folder(where)
    for path in sorted(where.glob("*.json")):
        _check_json(path)
    _check_leftovers(where)
    config = config_of_folder(where)
    check_tensors(where, config)
    _check_tokenizer(where, config)
    return counts


def check_sums(folder: str | os.PathLike) -> int:
    """Every file that SHA256SUMS names has the hash that stands there.

    Returns:
        How many were compared; 0 without that file.

    Raises:
        ValueError: a file is missing or holds something else, or a line names no file of the folder.
    """
    where = Path(folder)
    if not (where / SUMS).is_file():
        return 0
    lines = (where / SUMS).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        stated = SUM.fullmatch(line)
        if stated is None or Path(stated[2]).name != stated[2]:
            raise ValueError(f"{where / SUMS}, line {number}: a SHA-256 and the name of a file here were expected.")
        path = where / stated[2]
        if not path.is_file():
            raise ValueError(f"{path} is missing, which {SUMS} names.")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != stated[1]:
                raise ValueError(f"{path} is not the file that {SUMS} names: its SHA-256 is another.")
    return len(lines)


def check_values(folder: str | os.PathLike) -> int:
    """Every number of the weights is finite; reads all of them, one tensor at a time.

    Returns:
        How many numbers there are.

    Raises:
        ValueError: names the file and the first tensor with NaN or infinite numbers, and how many.
    """
    where, count = Path(folder), 0
    for file, tensors in shapes_of(where).items():
        with safe_open(where / file, framework="pt") as weights:
            for name in tensors:
                tensor = weights.get_tensor(name)
                count += tensor.numel()
                if not tensor.is_floating_point():
                    continue
                finite = int(tensor.float().isfinite().sum())
                if finite < tensor.numel():
                    bad = tensor.numel() - finite
                    raise ValueError(f"{where / file}: {name} holds {bad:,} NaN or infinite numbers.")
    return count


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _check_leftovers(folder: Path) -> None:
    """Weights that `from_pretrained` does not read, because others are there."""
    used = set(shapes_of(folder))
    if used != {SAFE_WEIGHTS_NAME}:
        used.add(SAFE_WEIGHTS_INDEX_NAME)
    patterns = ("model*.safetensors", SAFE_WEIGHTS_INDEX_NAME, "pytorch_model*.bin")
    found = {path.name for pattern in patterns for path in folder.glob(pattern)}
    if foreign := sorted(found - used):
        raise ValueError(
            f"{folder / foreign[0]} is left from another save: the weights of this checkpoint are in "
            f"{', '.join(sorted(used))}."
        )


def check_tensors(folder: Path, config: Any) -> None:
    """The weights are those of the class in `config.json`, in name and shape; of a delta, with what carries over.

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
    model = without_memory(lambda: family.load(architecture)(config))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    places = shapes_of(folder)
    found = {name: shape for shapes in places.values() for name, shape in shapes.items()}
    file_of = {name: folder / file for file, shapes in places.items() for name in shapes}
    carried: dict[str, str] = {}
    if is_delta(folder):
        delta = read_delta(folder)
        check_carried(folder, delta, found, expected)
        carried = delta.carried
    if missing := sorted(expected.keys() - found.keys() - _tied(model) - carried.keys()):
        raise ValueError(f"{folder}: no weight file holds {_few(missing)}, which {architecture} needs.")
    if foreign := sorted(name for name in found.keys() - expected.keys() if not _is_ignored(model, name)):
        raise ValueError(f"{file_of[foreign[0]]} holds {_few(foreign)}, which {architecture} does not have.")
    for name, shape in expected.items():
        if name not in carried and found.get(name, shape) != shape:
            raise ValueError(f"{file_of[name]}: {name} has shape {found[name]}, but {architecture} needs {shape}.")


def _tied(model: PreTrainedModel) -> set[str]:
    return set(getattr(model, "all_tied_weights_keys", None) or {})


def _is_ignored(model: PreTrainedModel, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _check_tokenizer(folder: Path, config: Any) -> None:
    if not (folder / "tokenizer.json").is_file():
        return
    try:
        tokens = len(AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False))
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ValueError(f"{folder / 'tokenizer.json'} holds no tokenizer: {error}") from error
    if tokens > config.vocab_size:
        raise ValueError(
            f"{folder / 'tokenizer.json'} has {tokens} tokens, but the model's vocab_size is {config.vocab_size}: it "
            "belongs to another model."
        )
