"""Checks of a checkpoint's folder: complete shards, unchanged code. Nothing in it is executed or unpickled."""

import hashlib
import math
import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_hybrid_ssm.hub.delta_files import DELTA_WEIGHTS, is_delta, read_delta
from hf_hybrid_ssm.hub.reading import check_readable, read_bytes, read_json, read_text
from hf_hybrid_ssm.hub.saved_configuration import check_sizes

LARGEST_CONFIG = 16 << 20  # bytes
INDEX = ".safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTERS = ("LORA", "IA3")

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
    tensors = check_saved(where)
    code = _check_code(where, read_config(where).get("auto_map") or {})
    sizes = [_bytes(*tensor) for of_file in tensors.values() for tensor in of_file.values()]
    return {"tensors": len(sizes), "bytes": sum(sizes), "files": len(tensors), "code": code}


def check_saved(folder: Path) -> dict[str, dict[str, tuple[tuple[int, ...], str]]]:
    """`check_folder` without the code, which `export_code` may still have to write; gives `tensors_of`."""
    read_config(folder)
    check_readable(folder)
    _check_adapter(folder)
    return tensors_of(folder)


def read_config(folder: Path) -> dict:
    """What `config.json` holds."""
    if not os.path.lexists(folder / "config.json"):
        raise ValueError(f"folder={str(folder)!r} has no config.json: save the model there first (save_pretrained).")
    file = folder / "config.json"
    saved = read_json(file, LARGEST_CONFIG)
    try:
        check_sizes(saved)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return saved


def seal(head: str, body: str) -> str:
    """The text of a file that says what it must hold."""
    return f"{head}{SEAL}{hashlib.sha256((head + body).encode()).hexdigest()}\n\n{body}"


def is_as_exported(path: Path) -> bool:
    """Whether a file holds what it was sealed with; one that is not to be read does not."""
    try:
        head, _, rest = read_bytes(path).partition(SEAL.encode())
    except ValueError:
        return False
    stated, _, body = rest.partition(b"\n\n")
    return stated == hashlib.sha256(head + body).hexdigest().encode()


def check_weights_if_local(folder: object) -> None:
    """The errors of `tensors_of` for a folder of this machine that holds safetensors; nothing for other names."""
    if not isinstance(folder, str | os.PathLike):
        return
    where = Path(folder)
    if named_weights(where) or any((where / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        tensors_of(where)


def weights_name(folder: Path) -> str:
    """The file with which transformers begins to read weights: itself one of them, or an index of several."""
    index = SAFE_WEIGHTS_INDEX_NAME
    usual = SAFE_WEIGHTS_NAME if (folder / SAFE_WEIGHTS_NAME).is_file() or not (folder / index).is_file() else index
    return named_weights(folder) or usual


def named_weights(folder: Path) -> str | None:
    """The file that `transformers_weights` of config.json names, which is read before any other; None without it.

    Raises:
        ValueError: it is not the name of such a file of the folder.
    """
    file = (folder / "config.json").resolve()
    if not file.is_file():
        return None
    name = read_json(file, LARGEST_CONFIG).get("transformers_weights")
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not name.endswith((".safetensors", INDEX)):
        raise ValueError(
            f"{folder / 'config.json'}: transformers_weights={name!r} must name a file of the folder, *.safetensors "
            f"or *{INDEX}."
        )
    return name


def tensors_of(folder: Path) -> dict[str, dict[str, tuple[tuple[int, ...], str]]]:
    """Weight file → name of a tensor → shape and dtype, as safetensors calls it; the errors of `check_folder`."""
    if is_delta(folder):
        read_delta(folder)
        return {DELTA_WEIGHTS: _header(folder / DELTA_WEIGHTS)}
    files = weight_files(folder)
    headers = {name: _header(folder / name) for name in files}
    for name, tensors in files.items():
        for tensor in tensors:
            if tensor not in headers[name]:
                index = weights_name(folder)
                raise ValueError(f"{folder / name} lacks the tensor {tensor!r} that {index} places there.")
    first: dict[str, str] = {}
    for name, header in headers.items():  # transformers reads all of each file, and takes the last
        for tensor in header:
            if (other := first.setdefault(tensor, name)) != name:
                raise ValueError(f"{folder / name} holds {tensor!r}, which {other} holds too: save one of them.")
    return headers


def weight_files(folder: Path) -> dict[str, list[str]]:
    """Weight file → the tensors that an index places there; read without the files, which may still have to be
    downloaded.

    Raises:
        ValueError: the index is none, or names a file that is not safetensors of this folder.
    """
    name = weights_name(folder)
    if not name.endswith(INDEX):
        return {name: []}
    index = folder / name
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files.")
    if not places:
        raise ValueError(f"{index} has an empty weight_map: it names no file with weights.")
    if outside := sorted({name for name in places.values() if Path(name).name != name}):
        raise ValueError(f"{index} points outside its folder: {outside[0]!r}.")
    files: dict[str, list[str]] = {name: [] for name in sorted(set(places.values()))}
    for tensor, name in places.items():
        files[name].append(tensor)
    return files


def _check_adapter(folder: Path) -> None:
    """PEFT's adapter beside a model, which transformers loads with it: there, complete, and only of this folder."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    kind = read_json(folder / ADAPTER_CONFIG, LARGEST_CONFIG).get("peft_type")
    if kind not in ADAPTERS:  # others name further adapters, which PEFT would fetch
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} has peft_type={kind!r}, and adapters of {' and '.join(ADAPTERS)} are read: "
            "merge it into the model (merge_and_unload) and save that."
        )
    _header(folder / ADAPTER_WEIGHTS)


def tensors_of_adapter(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name of a tensor → shape and dtype, of PEFT's adapter in a folder.

    Raises:
        ValueError: the file is missing or damaged.
    """
    return _header(folder / ADAPTER_WEIGHTS)


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    if not path.is_file():
        raise ValueError(f"{path} is missing.")
    try:
        with safe_open(path, framework="pt") as weights:  # checks header, offsets and length; maps the rest
            parts = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 - not a mapping
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
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
        text = read_text(folder / name)
        imported = re.findall(r"^\s*from\s+\.(\w+)\s+import", text, re.MULTILINE)
        wanted = {f"{module}.py": name for module in imported} | wanted
    return len(code)
