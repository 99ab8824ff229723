"""Checks of a checkpoint's folder: complete shards, unchanged code. Nothing in it is executed or unpickled."""

import hashlib
import json
import math
import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_hybrid_ssm.hub.delta_files import DELTA_WEIGHTS, is_delta, read_delta

SEAL = "# SHA-256 of this file without this line and the next: "
"""In the head of an exported file: transformers copies files one by one, and each must bring along what checks it."""


def check_folder(folder: str | os.PathLike) -> dict[str, int]:
    """Read a checkpoint's files as far as needed to know that they are complete and, if exported, unchanged.

    Returns:
        How many `tensors`, `bytes` of them, weight `files` and `code` files there are.

    Raises:
        ValueError: says which file is missing, cut off, contradicts the index, or is not the code that was exported.
    """
    where = Path(folder)
    config = read_config(where)
    tensors = check_weights(where)
    code = _check_code(where, config.get("auto_map") or {})
    sizes = [size for of_file in tensors.values() for size in of_file.values()]
    return {"tensors": len(sizes), "bytes": sum(sizes), "files": len(tensors), "code": code}


def read_json(path: Path) -> dict:
    """A file's JSON object; a ValueError that names the file if it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(found).__name__}.")
    return found


def read_config(folder: Path) -> dict:
    """What `config.json` holds."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"folder={str(folder)!r} has no config.json: save the model there first (save_pretrained).")
    return read_json(folder / "config.json")


def seal(head: str, body: str) -> str:
    """The text of a file that says what it must hold."""
    return f"{head}{SEAL}{hashlib.sha256((head + body).encode()).hexdigest()}\n\n{body}"


def is_as_exported(path: Path) -> bool:
    """Whether a file holds what it was sealed with."""
    head, _, rest = path.read_bytes().partition(SEAL.encode())
    stated, _, body = rest.partition(b"\n\n")
    return stated == hashlib.sha256(head + body).hexdigest().encode()


def check_weights(folder: Path) -> dict[str, dict[str, int]]:
    """Weight file → name of a tensor → bytes; the errors of `check_folder`."""
    return {name: {key: _bytes(*of) for key, of in tensors.items()} for name, tensors in _tensors(folder).items()}


def check_weights_if_local(folder: object) -> None:
    """The errors of `check_weights` for a folder of this machine that holds safetensors; nothing for other names."""
    if not isinstance(folder, str | os.PathLike):
        return
    where = Path(folder)
    if any((where / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        _tensors(where)


def shapes_of(folder: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Weight file → name of a tensor → shape; the errors of `check_folder`."""
    return {name: {key: tuple(of[0]) for key, of in tensors.items()} for name, tensors in _tensors(folder).items()}


def _tensors(folder: Path) -> dict[str, dict[str, tuple[list[int], str]]]:
    """Weight file → name of a tensor → shape and dtype."""
    if is_delta(folder):
        read_delta(folder)
        return {DELTA_WEIGHTS: _header(folder / DELTA_WEIGHTS)}
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).is_file() or not index.is_file():  # what transformers reads first
        return {SAFE_WEIGHTS_NAME: _header(folder / SAFE_WEIGHTS_NAME)}
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files.")
    if outside := sorted({name for name in places.values() if Path(name).name != name}):
        raise ValueError(f"{index} points outside its folder: {outside[0]!r}.")
    found = {name: _header(folder / name) for name in sorted(set(places.values()))}
    for tensor, name in places.items():
        if tensor not in found[name]:
            raise ValueError(f"{folder / name} lacks the tensor {tensor!r} that {index.name} places there.")
    return found


def _header(path: Path) -> dict[str, tuple[list[int], str]]:
    if not path.is_file():
        raise ValueError(f"{path} is missing.")
    try:
        with safe_open(path, framework="pt") as weights:  # checks header, offsets and length; maps the rest
            parts = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 - not a mapping
            return {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


def _bytes(shape: list[int], dtype: str) -> int:
    bits = 8 if dtype == "BOOL" else int("".join(part for part in dtype.split("_")[0] if part.isdigit()))
    return math.prod(shape) * bits // 8


def _check_code(folder: Path, auto_map: dict[str, str]) -> int:
    """Every file that `auto_map` names is there, with all that it imports, and no other code than the exported."""
    if not isinstance(auto_map, dict) or not all(isinstance(place, str) for place in auto_map.values()):
        raise ValueError(f"{folder / 'config.json'}: auto_map must say a file and class for each Auto class.")
    code = sorted(folder.glob("*.py"))
    for path in code:
        if not is_as_exported(path):
            raise ValueError(f"{path} was not written by export_code, or was changed since.")
    # an entry "repository--file.class" says that the code lies elsewhere
    wanted = {f"{place.split('.')[0]}.py": "config.json" for place in auto_map.values() if "--" not in place}
    known = {path.name for path in code}
    followed: set[str] = set()
    while ahead := sorted(wanted.keys() - followed):
        name = ahead[0]
        if name not in known:
            raise ValueError(f"{folder} lacks the code file {name} that {wanted[name]} names.")
        followed.add(name)
        text = (folder / name).read_text(encoding="utf-8")
        imported = re.findall(r"^\s*from\s+\.(\w+)\s+import", text, re.MULTILINE)
        wanted = {f"{module}.py": name for module in imported} | wanted
    return len(code)
