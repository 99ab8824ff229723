"""Random damage to checkpoint folders.

Right are an exception of a clear type, or a model whose every tensor equals what its files say, where the loading
report names what is missing or unexpected. An `AttributeError`, `KeyError` and the like raised by this package is a
fault. `hf_hybrid_ssm.hub.check_folder` must find a folder whole or raise a `ValueError`, and must find every fault for
which safetensors refuses to load. A pickle whose unpickling would write a file is among the damages; it must not be
executed. Which damage is found, and in which words, is in tests/hub, tests/cli and tests/models.
Not covered: a `config.json` that asks for a very wide model gets one, as in all of transformers; folders made to harm
are in tests/cli.
"""

import atexit
import json
import pickle
import shutil
import traceback
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_hybrid_ssm.hub import check_folder
from hf_hybrid_ssm.hub.official.longhorn import convert
from tests.models.test_longhorn_conversion import official_state_dict
from tests.reporting import THOROUGH
from tests.tiny_models import FEW, build, class_with_loss, classes_of

pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHTS, INDEX, CONFIG, OFFICIAL = "model.safetensors", "model.safetensors.index.json", "config.json", "official.pt"
VARIANTS = (*FEW[:3], "spade s5 chunk post-norm", "encoder-decoder")
CLEAR = (ValueError, OSError, RuntimeError, SafetensorError, StrictDataclassError, pickle.UnpicklingError)
VALUES = (-1, 0, 1, 7, 2.5, 1e308, "", "other", None, True, [], {}, [[]], "../../etc")
CASES = 60 if THOROUGH else 6  # of each damage


class Payload:
    """Unpickled, it would write a file; nothing may ever do so."""

    def __init__(self, folder: Path):
        self.mark = folder / "executed"

    def __reduce__(self):
        return Path.touch, (self.mark,)


@cache
def saved(variant: str, shards: bool) -> Path:
    """A folder with a tiny language model, in one file or several; one for all callers, who copy it."""
    folder = Path(mkdtemp(prefix="checkpoint-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build(variant).save_pretrained(folder, max_shard_size="8KB" if shards else "5GB")
    return folder


# -- random damage --------------------------------------------------------------------------------------------------


def _weights(folder: Path, random: Random) -> Path:
    return random.choice(sorted(folder.glob("*.safetensors")))


def _metadata(folder: Path, random: Random) -> Path:
    return random.choice([path for path in (folder / CONFIG, folder / INDEX) if path.exists()])


def _flip(path: Path, random: Random, end: int | None = None) -> None:
    """One to eight bits of the first `end` bytes turned over."""
    content = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 8)):
        content[random.randrange(min(end or len(content), len(content)))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def flipped(folder: Path, random: Random) -> None:
    """One to eight bits of the weights, of their header (whose size is in the first eight bytes) or of JSON."""
    path = random.choice([_weights, _weights, _metadata])(folder, random)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else len(content)
    _flip(path, random, random.choice([len(content), header, 8]))


def cut(folder: Path, random: Random) -> None:
    path = random.choice([_weights(folder, random), folder / CONFIG])
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def extended(folder: Path, random: Random) -> None:
    path = _weights(folder, random)
    path.write_bytes(path.read_bytes() + random.randbytes(random.randint(1, 99)))


def changed_header(folder: Path, random: Random) -> None:
    """A tensor is renamed, dropped, doubled, or has another dtype, shape or place."""
    path = _weights(folder, random)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = random.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    (begin, end), shape = entry["data_offsets"], entry["shape"]
    kind = random.choice(["rename", "drop", "double", "dtype", "shape", "place", "value"])
    if kind in ("rename", "drop"):
        header.pop(name)
    if kind in ("rename", "double"):
        header[name + random.choice(["s", ".weight", "é", " "])] = entry
    entry |= {
        "dtype": {"dtype": random.choice(["F16", "BF16", "I32", "U8", "F64", "F12", ""])},
        "shape": {"shape": random.choice([[], [0], shape[::-1], [*shape, 1], [2**40, 2**40], [-1]])},
        "place": {"data_offsets": random.choice([[end, begin], [begin + 4, end + 4], [0, 2**50], [begin, begin]])},
        "value": {random.choice(sorted(entry)): random.choice(VALUES)},
    }.get(kind, {})
    rewritten = json.dumps(header).encode()
    path.write_bytes(len(rewritten).to_bytes(8, "little") + rewritten + content[8 + size :])


def changed_json(folder: Path, random: Random) -> None:
    """An entry of the configuration or the index is dropped or has another value."""
    path = _metadata(folder, random)
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


def missing_shard(folder: Path, random: Random) -> None:
    _weights(folder, random).unlink()


def swapped_shards(folder: Path, random: Random) -> None:
    first, second = random.sample(sorted(folder.glob("*.safetensors")), 2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def hostile_pickle(folder: Path, random: Random) -> None:
    """A pickle that executes something, raw or in torch's archive, under any name that might be read."""
    payload = Payload(folder)
    name = random.choice([WEIGHTS, "pytorch_model.bin", "training_args.bin", "tf_model.h5", "optimizer.pt"])
    if name == "pytorch_model.bin" or random.random() < 0.5:
        (folder / WEIGHTS).unlink()
    if random.random() < 0.5:
        (folder / name).write_bytes(pickle.dumps(payload))
    else:
        torch.save(random.choice([payload, {"lm_head.weight": payload}]), folder / name)


def damaged_official(folder: Path, random: Random) -> None:
    """For the converter: a file of torch.save with flipped bits, cut, or with a payload."""
    weights: dict = official_state_dict()
    if random.random() < 0.2:
        weights[random.choice(sorted(weights))] = Payload(folder)
    path = folder / OFFICIAL
    torch.save(weights, path)
    kind = random.choice(["flip", "cut", "whole"])
    if kind == "flip":
        _flip(path, random)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


SINGLE = (flipped, cut, extended, changed_header, changed_json, hostile_pickle)
SHARDED = (flipped, changed_json, missing_shard, swapped_shards, cut, changed_header)
DAMAGES = [(damage, False) for damage in (*SINGLE, damaged_official)] + [(damage, True) for damage in SHARDED]


@pytest.mark.parametrize(("damage", "shards"), DAMAGES)
def test_damaged_folders_are_refused_or_load_as_they_say(damage, shards, tmp_path, record_property):
    outcomes: list[str] = []
    for number in range(CASES):
        random = Random(f"{damage.__name__} {shards} {number}")
        variant, copy = random.choice(VARIANTS), tmp_path / str(number)
        shutil.copytree(saved(variant, shards), copy)
        damage(copy, random)
        whole = _is_whole(copy)
        try:
            if damage is damaged_official:
                outcomes.append(_convert(copy / OFFICIAL))
            else:
                outcomes.append(_load(copy, classes_of(variant)[class_with_loss(variant)]))
        except CLEAR as error:
            assert not (whole and isinstance(error, SafetensorError)), f"check_folder found nothing: {error}"
            outcomes.append("refused")
        except Exception as error:
            assert not from_this_package(error), f"case {number}: {type(error).__name__}: {error}"
            outcomes.append("refused by a dependency's error of an unclear type")
        assert not (copy / "executed").exists(), "the checkpoint's code was executed"
    for outcome in sorted(set(outcomes)):
        record_property(outcome, outcomes.count(outcome))


def _is_whole(folder: Path) -> bool:
    """What `check_folder` says; any other exception than a ValueError is a fault."""
    try:
        check_folder(folder)
    except ValueError:
        return False
    return True


def from_this_package(error: Exception) -> bool:
    return "hf_hybrid_ssm" in traceback.extract_tb(error.__traceback__)[-1].filename


def _load(folder: Path, model_class: type[PreTrainedModel]) -> str:
    model, told = model_class.from_pretrained(folder, output_loading_info=True)
    assert (fault := unfaithful(model, told, _tensors(folder))) is None, fault
    differs = any(told.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return "loaded, and the report names what differs" if differs else "loaded as its files say"


def _convert(path: Path) -> str:
    """The converter took every tensor of the file, or the file is undamaged in what counts."""
    model, kept = convert(path), torch.load(path, map_location="cpu", weights_only=True)
    embedding = kept["transformer.backbone.embedding.weight"]
    assert torch.equal(model.model.embed_tokens.weight.detach().view(torch.uint8), embedding.view(torch.uint8))
    return "loaded as its files say"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What the weight files say, read without transformers."""
    if not (folder / INDEX).is_file():
        return load_file(folder / WEIGHTS)
    files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def unfaithful(model: PreTrainedModel, told: dict, tensors: dict[str, torch.Tensor]) -> str | None:
    """Where a loaded model differs from its files without the loading report saying so."""
    state = model.state_dict()
    for name, value in state.items():
        if name in (getattr(model, "all_tied_weights_keys", None) or {}):
            continue
        if name not in tensors:
            if name not in told["missing_keys"]:
                return f"{name} is in no file, which the report does not say"
        elif not torch.equal(*(t.contiguous().view(torch.uint8) for t in (value, tensors[name].to(value.dtype)))):
            return f"{name} differs from the file"
    silent = tensors.keys() - state.keys() - set(told["unexpected_keys"])
    return f"{sorted(silent)} were left out, which the report does not say" if silent else None
