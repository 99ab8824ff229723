"""Checkpoint folders that are cut off, changed, incomplete or hostile, and the converter's inputs."""

import atexit
import json
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import hf_hybrid_ssm
from hf_hybrid_ssm.hub import check_folder
from hf_hybrid_ssm.models.longhorn.convert_official_checkpoint import convert
from tests.models.test_longhorn_conversion import official_state_dict
from tests.reliability.misuses import Misuse
from tests.reliability.population import build

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


@cache
def saved(shards: bool = False) -> Path:
    """A folder with a small Longhorn, in one file or in several."""
    folder = Path(mkdtemp(prefix="misuse-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build("longhorn", "LonghornForCausalLM").save_pretrained(folder, max_shard_size="10KB" if shards else "5GB")
    return folder


class Payload:
    """Unpickled, it would write a file; nothing may ever do so."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def checkpoint(change: Callable[[Path], object], load: Callable[[Path], object], shards: bool = False):
    """Provokes: a copy of the folder is changed and loaded; what it wanted executed must not have been."""

    def provoke(folder: Path) -> None:
        copy = folder / "checkpoint"
        shutil.copytree(saved(shards), copy)
        change(copy)
        try:
            load(copy)
        finally:
            assert not (copy / "executed").exists(), "the checkpoint's code was executed"

    return provoke


def load(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder)


def bytes_of(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))

    return edit


def tensors_of(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def json_of(name: str, **fields) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | fields))

    return edit


def text_of(name: str, text: str | bytes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return edit


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(name)).unlink()


def pickled(name: str) -> Callable[[Path], None]:
    """A pickle under the name of a weight file."""

    def edit(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Payload(folder / "executed")))

    return edit


def torch_saved(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        torch.save({"lm_head.weight": Payload(folder / "executed")}, folder / name)

    return edit


def pointing_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


BROKEN, REFUSED = (SafetensorError,), (ValueError,)
HEADER = "Error while deserializing header"
MISMATCH = "ignore_mismatched_sizes"
SINGLE = [
    ("weights cut in half", bytes_of(lambda b: b[: len(b) // 2]), BROKEN, f"{HEADER}.*not fully covered"),
    ("weights cut within the header", bytes_of(lambda b: b[:20]), BROKEN, f"{HEADER}.*invalid header length"),
    ("an empty weight file", bytes_of(lambda b: b""), BROKEN, f"{HEADER}.*too small"),
    ("bytes behind the weights", bytes_of(lambda b: b + b"more"), BROKEN, f"{HEADER}.*not fully covered"),
    ("a header of 2^60 bytes", bytes_of(lambda b: (2**60).to_bytes(8, "little") + b[8:]), BROKEN, f"{HEADER}.*large"),
    ("a bit of the header flipped", bytes_of(lambda b: b[:8] + bytes([b[8] ^ 1]) + b[9:]), BROKEN, f"{HEADER}.*JSON"),
    ("a pickle named model.safetensors", pickled(WEIGHTS), BROKEN, HEADER),
    ("a file of torch.save named model.safetensors", torch_saved(WEIGHTS), BROKEN, HEADER),
    ("a pickle named pytorch_model.bin", pickled("pytorch_model.bin"), (pickle.UnpicklingError,), "[Ww]eights.only"),
    (
        "a file of torch.save with an object in it",
        torch_saved("pytorch_model.bin"),
        (pickle.UnpicklingError,),
        "[Ww]eights.only",
    ),
    ("no weights", without(WEIGHTS), (OSError,), "no file named model.safetensors"),
    ("no config.json", without(CONFIG), REFUSED, "config.json"),
    ("a config.json that is no JSON", text_of(CONFIG, "{"), (OSError,), "config.json' is not a valid JSON"),
    ("a config.json of binary data", text_of(CONFIG, b"\xff\xfe\x00"), (OSError,), "config.json' is not a valid JSON"),
    ("a config.json without a model type", text_of(CONFIG, "{}"), REFUSED, "Should have a `model_type` key"),
    ("a model type that nobody registered", json_of(CONFIG, model_type="mambo"), REFUSED, "model type `mambo`"),
    (
        "code of its own without trust",
        json_of(CONFIG, model_type="own", auto_map={"AutoModelForCausalLM": "own.Model"}),
        REFUSED,
        "model type `own`",
    ),
    (
        "another family's model type",
        json_of(CONFIG, model_type="bst"),
        REFUSED,
        "block_types contains.*'sliding_attention'",
    ),
    ("a size that is negative", json_of(CONFIG, hidden_size=-1), REFUSED, "hidden_size=-1 must be positive"),
    ("a size as text", json_of(CONFIG, hidden_size="24"), (StrictDataclassError,), "hidden_size.*int, got str"),
    ("a size that the weights do not have", json_of(CONFIG, hidden_size=32), (RuntimeError,), MISMATCH),
    ("a vocabulary that the weights do not have", json_of(CONFIG, vocab_size=62), (RuntimeError,), MISMATCH),
    (
        "a tensor of another shape",
        tensors_of(lambda t: t.update({"model.norm.weight": torch.zeros(5)})),
        (RuntimeError,),
        MISMATCH,
    ),
]
CHECKED = [
    ("a missing shard", without("model-00002*"), r"model-00002-of-\d+.safetensors is missing"),
    ("an index that is no JSON", text_of(INDEX, "{"), "index.json is not valid JSON"),
    ("an index without a map", text_of(INDEX, "{}"), "index.json has no weight_map"),
    ("an index that is a list", text_of(INDEX, "[]"), "index.json must hold a JSON object, not list"),
    ("an index that points outside the folder", pointing_outside, "points outside its folder: '../elsewhere"),
]


def conversion(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def provoke(folder: Path) -> None:
        weights = official_state_dict()
        change(weights)
        torch.save(weights, folder / "official.pt")
        convert(folder / "official.pt")

    return provoke


def conversion_of(write: Callable[[Path], object], name: str = "official.pt") -> Callable[[Path], None]:
    def provoke(folder: Path) -> None:
        write(folder / name)
        try:
            convert(folder / name)
        finally:
            assert not (folder / "executed").exists(), "the checkpoint's code was executed"

    return provoke


MIXER = "transformer.backbone.layers.1.mixer."
EMBEDDING = "transformer.backbone.embedding.weight"
CONVERSIONS = [
    ("an unknown tensor", conversion(lambda w: w.update({MIXER + "E": torch.zeros(1)})), "Unknown tensors.*mixer.E"),
    ("a tensor that is missing", conversion(lambda w: w.pop(MIXER + "D")), "lacks model.layers.1.mixer.D"),
    ("no embedding", conversion(lambda w: w.pop(EMBEDDING)), "lacks model.embed_tokens.weight"),
    ("a Mamba's tensors", conversion(lambda w: w.update({MIXER + "A_log": torch.zeros(1)})), "it is a Mamba"),
    (
        "a tensor of another shape",
        conversion(lambda w: w.update({MIXER + "D": torch.zeros(3)})),
        r"mixer.D has shape \(3,\)",
    ),
    (
        "an embedding of one dimension",
        conversion(lambda w: w.update({EMBEDDING: torch.zeros(24)})),
        r"model.embed_tokens.weight has shape \(24,\), but 2 dimensions",
    ),
    (
        "a layer number far beyond the others",
        conversion(lambda w: w.update({"backbone.layers.99999999.mixer.D": torch.zeros(32)})),
        "lacks layers between 0 and 99999999",
    ),
    ("a file of text", conversion_of(lambda path: path.write_text("no tensors")), "cannot be read as a checkpoint"),
    ("an empty file", conversion_of(lambda path: path.write_bytes(b"")), "cannot be read as a checkpoint"),
    (
        "a pickle",
        conversion_of(lambda path: path.write_bytes(pickle.dumps(Payload(path.with_name("executed"))))),
        "cannot be read as a checkpoint",
    ),
    (
        "an object among the tensors",
        conversion_of(lambda path: torch.save({"model": Payload(path.with_name("executed"))}, path)),
        "cannot be read as a checkpoint",
    ),
    (
        "a pickle named .safetensors",
        conversion_of(lambda path: path.write_bytes(pickle.dumps([1])), "official.safetensors"),
        "cannot be read as a checkpoint.*SafetensorError",
    ),
    ("a list of tensors", conversion_of(lambda path: torch.save([torch.zeros(1)], path)), "holds no state dict"),
    ("numbers for tensors", conversion_of(lambda path: torch.save({"a": 1.0}, path)), "holds no state dict"),
]


def _load(auto: type) -> Callable[[Path], object]:
    return lambda folder: auto.from_pretrained(saved())


OTHERS = [
    Misuse("checkpoint", "loaded as an encoder-decoder", _load(AutoModelForSeq2SeqLM), REFUSED, "LonghornConfig"),
    Misuse("checkpoint", "loaded as a masked model", _load(AutoModelForMaskedLM), REFUSED, "LonghornConfig"),
    Misuse(
        "checkpoint",
        "loaded by another family's class",
        _load(hf_hybrid_ssm.BstForCausalLM),
        REFUSED,
        "block_types contains.*'sliding_attention'",
    ),
    Misuse(
        "checkpoint",
        "a folder that does not exist",
        lambda folder: load(folder / "nowhere"),
        (OSError,),
        "nowhere",
    ),
    Misuse(
        "checkpoint",
        "an argument that no model has",
        lambda folder: AutoModelForCausalLM.from_pretrained(saved(), quantize=True),
        (TypeError,),
        "unexpected keyword argument 'quantize'",
    ),
    Misuse(
        "checkpoint",
        "a state dict without tensors",
        lambda folder: build("longhorn", "LonghornForCausalLM").load_state_dict({}),
        (RuntimeError,),
        "Missing key.*model.embed_tokens.weight",
    ),
    Misuse(
        "converter",
        "a file that does not exist",
        lambda folder: convert(folder / "nowhere.pt"),
        (FileNotFoundError,),
        "nowhere.pt",
    ),
]
MISUSES = [
    *(Misuse("checkpoint", done, checkpoint(change, load), kinds, words) for done, change, kinds, words in SINGLE),
    *(
        Misuse("folder check", done, checkpoint(change, check_folder, shards=True), REFUSED, words)
        for done, change, words in CHECKED
    ),
    *(Misuse("converter", done, provoke, REFUSED, words) for done, provoke, words in CONVERSIONS),
    *OTHERS,
]
