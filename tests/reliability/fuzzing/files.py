"""Random damage to checkpoint folders; a damaged folder must be refused, or load as what its files say."""

import atexit
import json
import pickle
import shutil
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

import hf_hybrid_ssm
from hf_hybrid_ssm.hub import check_folder
from hf_hybrid_ssm.models.longhorn.convert_official_checkpoint import convert
from tests.models.test_longhorn_conversion import official_state_dict
from tests.reliability.population import build, classes_of

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
OFFICIAL = "official.pt"
VARIANTS = (
    "longhorn + window and full attention",
    "bst mh s4",
    "lmu-isa",
    "spade s5 chunk post-norm",
    "encoder-decoder",
)
CLEAR = (ValueError, OSError, RuntimeError, SafetensorError, StrictDataclassError, pickle.UnpicklingError)
VALUES = (-1, 0, 1, 7, 2.5, 1e308, "", "other", None, True, [], {}, [[]], "../../etc")


@cache
def saved(variant: str, shards: bool) -> tuple[Path, type[PreTrainedModel]]:
    """A folder with a tiny language model, in one file or several, and its class."""
    name = next(n for n in classes_of(variant) if "CausalLM" in n or "Conditional" in n)
    folder = Path(mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build(variant, name).save_pretrained(folder, max_shard_size="8KB" if shards else "5GB")
    return folder, getattr(hf_hybrid_ssm, name)


class Payload:
    """Unpickled, it would write a file; nothing may ever do so."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def flip(content: bytes, random: Random, end: int | None = None) -> bytes:
    """One to eight bits of the first `end` bytes turned over."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 8)):
        changed[random.randrange(min(end or len(changed), len(changed)))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _weight_file(folder: Path, random: Random) -> Path:
    return random.choice(sorted(folder.glob("*.safetensors")))


def flipped_bits(folder: Path, random: Random) -> None:
    _edit(_weight_file(folder, random), lambda content: flip(content, random))


def flipped_header(folder: Path, random: Random) -> None:
    def change(content: bytes) -> bytes:
        return flip(content, random, 8 + int.from_bytes(content[:8], "little"))

    _edit(_weight_file(folder, random), change)


def flipped_header_size(folder: Path, random: Random) -> None:
    _edit(_weight_file(folder, random), lambda content: flip(content, random, 8))


def cut(folder: Path, random: Random) -> None:
    _edit(_weight_file(folder, random), lambda content: content[: random.randrange(len(content))])


def extended(folder: Path, random: Random) -> None:
    _edit(_weight_file(folder, random), lambda content: content + random.randbytes(random.randint(1, 99)))


def changed_header(folder: Path, random: Random) -> None:
    """A tensor is renamed, dropped, doubled, or has another dtype, shape or place."""

    def change(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        name = random.choice([key for key in header if key != "__metadata__"])
        entry = header[name]
        kind = random.choice(["rename", "drop", "double", "dtype", "shape", "place", "value"])
        if kind in ("rename", "drop"):
            header.pop(name)
        if kind in ("rename", "double"):
            header[name + random.choice(["s", ".weight", "é", " "])] = entry
        elif kind == "dtype":
            entry["dtype"] = random.choice(["F16", "BF16", "I32", "U8", "F64", "F12", ""])
        elif kind == "shape":
            entry["shape"] = random.choice([[], [0], entry["shape"][::-1], [*entry["shape"], 1], [2**40, 2**40], [-1]])
        elif kind == "place":
            begin, end = entry["data_offsets"]
            entry["data_offsets"] = random.choice([[end, begin], [begin + 4, end + 4], [0, 2**50], [begin, begin]])
        elif kind == "value":
            entry[random.choice(sorted(entry))] = random.choice(VALUES)
        rewritten = json.dumps(header).encode()
        return len(rewritten).to_bytes(8, "little") + rewritten + content[8 + size :]

    _edit(_weight_file(folder, random), change)


def _changed_json(path: Path, random: Random) -> None:
    content = json.loads(path.read_text())
    place = content
    if isinstance(content.get("weight_map"), dict) and random.random() < 0.8:
        place = content["weight_map"]
    name = random.choice(sorted(place))
    if random.random() < 0.3:
        del place[name]
    else:
        place[name] = random.choice(VALUES)
    path.write_text(json.dumps(content))


def changed_config(folder: Path, random: Random) -> None:
    _changed_json(folder / CONFIG, random)


def flipped_config(folder: Path, random: Random) -> None:
    _edit(folder / CONFIG, lambda content: flip(content, random))


def cut_config(folder: Path, random: Random) -> None:
    _edit(folder / CONFIG, lambda content: content[: random.randrange(len(content))])


def changed_index(folder: Path, random: Random) -> None:
    _changed_json(folder / INDEX, random)


def flipped_index(folder: Path, random: Random) -> None:
    _edit(folder / INDEX, lambda content: flip(content, random))


def missing_shard(folder: Path, random: Random) -> None:
    _weight_file(folder, random).unlink()


def swapped_shards(folder: Path, random: Random) -> None:
    first, second = random.sample(sorted(folder.glob("*.safetensors")), 2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def hostile_pickle(folder: Path, random: Random) -> None:
    """A pickle that executes something, raw or in torch's archive, under any name that might be read."""
    payload = Payload(folder / "executed")
    name = random.choice([WEIGHTS, "pytorch_model.bin", "training_args.bin", "tf_model.h5", "optimizer.pt"])
    if name == "pytorch_model.bin" or random.random() < 0.5:
        (folder / WEIGHTS).unlink()
    if random.random() < 0.5:
        (folder / name).write_bytes(pickle.dumps(payload))
    else:
        torch.save(random.choice([payload, {"lm_head.weight": payload}]), folder / name)


def damaged_official(folder: Path, random: Random) -> None:
    """For the converter: a file of torch.save with flipped bits, cut, or with a payload."""
    weights = official_state_dict()
    if random.random() < 0.2:
        weights[random.choice(sorted(weights))] = Payload(folder / "executed")  # type: ignore[assignment]
    torch.save(weights, folder / OFFICIAL)
    change = random.choice([lambda c: flip(c, random), lambda c: c[: random.randrange(len(c))], lambda c: c])
    _edit(folder / OFFICIAL, change)


SINGLE = (
    flipped_bits, flipped_header, flipped_header_size, cut, extended, changed_header, changed_config, flipped_config,
    cut_config, hostile_pickle,
)  # fmt: skip
SHARDED = (changed_index, flipped_index, missing_shard, swapped_shards, cut, changed_header)
DAMAGES: tuple[tuple[str, bool, Callable[[Path, Random], None]], ...] = (
    *((damage.__name__.replace("_", " "), False, damage) for damage in SINGLE),
    *((damage.__name__.replace("_", " ") + ", in shards", True, damage) for damage in SHARDED),
    ("damaged official checkpoint", False, damaged_official),
)


def file_case(seed: str, folder: Path) -> tuple[str, str, str | None]:
    """(damage, outcome, what went wrong or None) of one damaged folder."""
    random = Random(seed)
    name, shards, damage = random.choice(DAMAGES)
    source, model_class = saved(random.choice(VARIANTS), shards)
    copy = folder / "checkpoint"
    shutil.copytree(source, copy)
    damage(copy, random)
    whole, unclear = _checked(copy)
    try:
        outcome, fault = _load(copy, model_class, damage is damaged_official)
    except Exception as error:
        outcome, fault = _refused(error)
        if whole and isinstance(error, SafetensorError):
            fault = f"check_folder finds nothing wrong, but loading does: {error}"
    fault = fault or unclear
    if (copy / "executed").exists():
        fault = "the checkpoint's code was executed"
    return name, outcome, fault and f"{name}: {fault}"


def _checked(folder: Path) -> tuple[bool, str | None]:
    """(whether `check_folder` finds the folder whole, what is wrong with its answer)."""
    try:
        check_folder(folder)
    except ValueError:
        return False, None
    except Exception as error:
        return False, f"{type(error).__name__} from check_folder: {error}"
    return True, None


def _load(folder: Path, model_class: type[PreTrainedModel], official: bool) -> tuple[str, str | None]:
    if official:
        convert(folder / OFFICIAL)
        return "loaded as its files say", _unequal_to_official(folder / OFFICIAL)
    model, told = model_class.from_pretrained(folder, output_loading_info=True)
    fault = unfaithful(model, told, _tensors(folder))
    return (
        "loaded, and the report names what differs" if _names_something(told) else "loaded as its files say"
    ), fault


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What the weight files say, read without transformers."""
    if not (folder / INDEX).is_file():
        return load_file(folder / WEIGHTS)
    files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def _names_something(told: dict) -> bool:
    return any(told.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def unfaithful(model: PreTrainedModel, told: dict, tensors: dict[str, torch.Tensor]) -> str | None:
    """Where a loaded model differs from its files without the loading report saying so."""
    state = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for name, value in state.items():
        if name in tied:
            continue
        if name not in tensors:
            if name not in told["missing_keys"]:
                return f"{name} is in no file, which the report does not say"
        elif not torch.equal(*(t.contiguous().view(torch.uint8) for t in (value, tensors[name].to(value.dtype)))):
            return f"{name} differs from the file"
    silent = tensors.keys() - state.keys() - set(told["unexpected_keys"])
    return f"{sorted(silent)} were left out, which the report does not say" if silent else None


def _unequal_to_official(path: Path) -> str | None:
    """The converter took every tensor of the file, or the file is undamaged in what counts."""
    kept = torch.load(path, map_location="cpu", weights_only=True)
    model = convert(path)
    embedding = kept["transformer.backbone.embedding.weight"]
    same = torch.equal(model.model.embed_tokens.weight.detach().view(torch.uint8), embedding.view(torch.uint8))
    return None if same else "the embedding differs from the file"


def _refused(error: Exception) -> tuple[str, str | None]:
    """An exception is right if its type says that the data is bad; from this package every other type is a fault."""
    if isinstance(error, CLEAR):
        return "refused", None
    ours = "hf_hybrid_ssm" in traceback.extract_tb(error.__traceback__)[-1].filename
    fault = f"{type(error).__name__} from this package: {error}" if ours else None
    return f"refused by a dependency's {type(error).__name__}", fault
