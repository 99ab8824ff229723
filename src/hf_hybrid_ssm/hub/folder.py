"""What a checkpoint's folder holds: whole shards, unchanged code. Nothing in it is executed or unpickled.

python -m hf_hybrid_ssm.hub.folder FOLDER
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

MANIFEST = "code.json"
"""Lists the exported files with their SHA-256 (see `hf_hybrid_ssm.hub.export`)."""


def check_folder(folder: str | os.PathLike) -> dict[str, int]:
    """Read a checkpoint's files as far as needed to know that they are whole and, if exported, unchanged.

    Returns:
        Counts: `tensors`, `bytes` of them, weight `files`, and `code` files.

    Raises:
        ValueError: says which file is missing, cut off, contradicts the index, or is not the code that was exported.
    """
    where = Path(folder)
    if not (where / "config.json").is_file():
        raise ValueError(f"folder={str(where)!r} has no config.json; it is no saved model.")
    read_json(where / "config.json")
    tensors = check_weights(where)
    code = _check_code(where)
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


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_weights(folder: Path) -> dict[str, dict[str, int]]:
    """Weight file → name of a tensor → bytes; the errors of `check_folder`."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return {SAFE_WEIGHTS_NAME: _sizes(folder / SAFE_WEIGHTS_NAME)}
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files.")
    if outside := sorted({name for name in places.values() if Path(name).name != name}):
        raise ValueError(f"{index} points outside its folder: {outside[0]!r}.")
    found = {name: _sizes(folder / name) for name in sorted(set(places.values()))}
    for tensor, name in places.items():
        if tensor not in found[name]:
            raise ValueError(f"{folder / name} lacks the tensor {tensor!r} that {index.name} places there.")
    return found


def _sizes(path: Path) -> dict[str, int]:
    if not path.is_file():
        raise ValueError(f"{path} is missing.")
    try:
        with safe_open(path, framework="pt") as weights:  # checks header, offsets and length; maps the rest
            sizes = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 - not a mapping
            return {name: _bytes(part.get_shape(), part.get_dtype()) for name, part in sizes.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error


def _bytes(shape: list[int], dtype: str) -> int:
    bits = 8 if dtype == "BOOL" else int("".join(part for part in dtype.split("_")[0] if part.isdigit()))
    count = 1
    for size in shape:
        count *= size
    return count * bits // 8


def _check_code(folder: Path) -> int:
    if not (folder / MANIFEST).is_file():
        if found := sorted(path.name for path in folder.glob("*.py")):
            raise ValueError(f"{folder} holds code without a {MANIFEST} to check it by: {', '.join(found)}.")
        return 0
    hashes = read_json(folder / MANIFEST).get("sha256")
    if not isinstance(hashes, dict):
        raise ValueError(f"{folder / MANIFEST} has no table sha256.")
    present = {path.name for path in folder.glob("*.py")}
    if missing := sorted(hashes.keys() - present):
        raise ValueError(f"{folder} lacks the code file {missing[0]} that {MANIFEST} lists.")
    if added := sorted(present - hashes.keys()):
        raise ValueError(f"{folder / added[0]} is not among the files that {MANIFEST} lists.")
    for name, expected in hashes.items():
        if file_hash(folder / name) != expected:
            raise ValueError(f"{folder / name} was changed after it was exported: its SHA-256 is not in {MANIFEST}.")
    return len(hashes)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m hf_hybrid_ssm.hub.folder FOLDER")
    try:
        found = check_folder(sys.argv[1])
    except ValueError as error:
        sys.exit(f"refused: {error}")
    print(", ".join(f"{count:,} {kind}" for kind, count in found.items()))


if __name__ == "__main__":
    main()
