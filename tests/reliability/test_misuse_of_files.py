"""Checkpoint folders that are cut off, changed, incomplete or hostile, and the converter's inputs."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import hf_hybrid_ssm
from hf_hybrid_ssm.hub import check_folder
from hf_hybrid_ssm.models.longhorn.convert_official_checkpoint import convert
from tests.models.test_longhorn_conversion import official_state_dict
from tests.reliability.folders import CONFIG, INDEX, WEIGHTS, Payload, saved
from tests.reliability.refusals import assert_refused, mistakes
from tests.tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore")
MIXER = "transformer.backbone.layers.1.mixer."
EMBEDDING = "transformer.backbone.embedding.weight"


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder)


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
        convert(folder / name)

    return provoke


# fmt: off
SINGLE = [
    (bytes_of(lambda b: b[: len(b) // 2]), "ValueError: model.safetensors is not a complete.*not fully covered"),
    (bytes_of(lambda b: b[:20]), "ValueError: model.safetensors is not a complete.*invalid header length"),
    (bytes_of(lambda b: b""), "ValueError: model.safetensors is not a complete.*too small"),
    (bytes_of(lambda b: b + b"more"), "ValueError: model.safetensors is not a complete.*not fully covered"),
    (bytes_of(lambda b: (2**60).to_bytes(8, "little") + b[8:]),
     "ValueError: model.safetensors is not a complete.*large"),
    (bytes_of(lambda b: b[:8] + bytes([b[8] ^ 1]) + b[9:]), "ValueError: model.safetensors is not a complete.*JSON"),
    (pickled(WEIGHTS), "ValueError: model.safetensors is not a complete"),
    (torch_saved(WEIGHTS), "ValueError: model.safetensors is not a complete"),
    (pickled("pytorch_model.bin"), "UnpicklingError: [Ww]eights.only"),
    (torch_saved("pytorch_model.bin"), "UnpicklingError: [Ww]eights.only"),
    (without(WEIGHTS), "OSError: no file named model.safetensors"),
    (without(CONFIG), "ValueError: config.json"),
    (text_of(CONFIG, "{"), "OSError: config.json' is not a valid JSON"),
    (text_of(CONFIG, b"\xff\xfe\x00"), "OSError: config.json' is not a valid JSON"),
    (text_of(CONFIG, "{}"), "ValueError: Should have a `model_type` key"),
    (json_of(CONFIG, model_type="mambo"), "ValueError: model type `mambo`"),
    (json_of(CONFIG, model_type="own", auto_map={"AutoModelForCausalLM": "own.Model"}),
     "ValueError: model type `own`"),
    (json_of(CONFIG, model_type="bst"), "ValueError: block_types contains.*'sliding_attention'"),
    (json_of(CONFIG, hidden_size=-1), "ValueError: hidden_size=-1 must be positive"),
    (json_of(CONFIG, hidden_size="24"), "StrictDataclassError: hidden_size.*int, got str"),
    (json_of(CONFIG, hidden_size=32), "RuntimeError: ignore_mismatched_sizes"),
    (json_of(CONFIG, vocab_size=62), "RuntimeError: ignore_mismatched_sizes"),
    (tensors_of(lambda t: t.update({"model.norm.weight": torch.zeros(5)})), "RuntimeError: ignore_mismatched_sizes"),
]
SHARDED = [
    (without("model-00002*"), r"ValueError: model-00002-of-\d+.safetensors is missing"),
    (text_of(INDEX, "{"), "ValueError: index.json is not valid JSON"),
    (text_of(INDEX, "{}"), "ValueError: index.json has no weight_map"),
    (text_of(INDEX, "[]"), "ValueError: index.json must hold a JSON object, not list"),
    (pointing_outside, "ValueError: points outside its folder: '../elsewhere"),
]
CONVERSIONS = [
    (conversion(lambda w: w.update({MIXER + "E": torch.zeros(1)})), "ValueError: Unknown tensors.*mixer.E"),
    (conversion(lambda w: w.pop(MIXER + "D")), "ValueError: lacks model.layers.1.mixer.D"),
    (conversion(lambda w: w.pop(EMBEDDING)), "ValueError: lacks model.embed_tokens.weight"),
    (conversion(lambda w: w.update({MIXER + "A_log": torch.zeros(1)})), "ValueError: it is a Mamba"),
    (conversion(lambda w: w.update({MIXER + "D": torch.zeros(3)})), r"ValueError: mixer.D has shape \(3,\)"),
    (conversion(lambda w: w.update({EMBEDDING: torch.zeros(24)})),
     r"ValueError: model.embed_tokens.weight has shape \(24,\), but 2 dimensions"),
    (conversion(lambda w: w.update({"backbone.layers.99999999.mixer.D": torch.zeros(32)})),
     "ValueError: lacks layers between 0 and 99999999"),
    (conversion_of(lambda path: path.write_text("no tensors")), "ValueError: cannot be read as a checkpoint"),
    (conversion_of(lambda path: path.write_bytes(b"")), "ValueError: cannot be read as a checkpoint"),
    (conversion_of(lambda path: path.write_bytes(pickle.dumps(Payload(path.with_name("executed"))))),
     "ValueError: cannot be read as a checkpoint"),
    (conversion_of(lambda path: torch.save({"model": Payload(path.with_name("executed"))}, path)),
     "ValueError: cannot be read as a checkpoint"),
    (conversion_of(lambda path: path.write_bytes(pickle.dumps([1])), "official.safetensors"),
     "ValueError: cannot be read as a checkpoint.*SafetensorError"),
    (conversion_of(lambda path: torch.save([torch.zeros(1)], path)), "ValueError: holds no state dict"),
    (conversion_of(lambda path: torch.save({"a": 1.0}, path)), "ValueError: holds no state dict"),
    (lambda folder: convert(folder / "nowhere.pt"), "FileNotFoundError: nowhere.pt"),
]
OTHERS = [
    (AutoModelForSeq2SeqLM.from_pretrained, "ValueError: LonghornConfig"),
    (AutoModelForMaskedLM.from_pretrained, "ValueError: LonghornConfig"),
    (hf_hybrid_ssm.BstForCausalLM.from_pretrained, "ValueError: block_types contains.*'sliding_attention'"),
    (lambda folder: load(folder / "nowhere"), "OSError: nowhere"),
    (lambda folder: AutoModelForCausalLM.from_pretrained(folder, quantize=True),
     "TypeError: unexpected keyword argument 'quantize'"),
    (lambda folder: build("longhorn").load_state_dict({}), "RuntimeError: Missing key.*model.embed_tokens.weight"),
]
# fmt: on


def changed(folder: Path, change: Callable[[Path], object], shards: bool = False) -> Path:
    copy = folder / "checkpoint"
    shutil.copytree(saved("longhorn", shards), copy)
    change(copy)
    return copy


@mistakes(SINGLE)
def test_damaged_folders(call, answer, tmp_path):
    folder = changed(tmp_path, call)
    assert_refused(lambda: load(folder), answer)
    assert not (folder / "executed").exists(), "the checkpoint's code was executed"


@mistakes(SHARDED)
def test_folders_that_the_check_refuses(call, answer, tmp_path):
    folder = changed(tmp_path, call, shards=True)
    assert_refused(lambda: check_folder(folder), answer)


@mistakes(CONVERSIONS)
def test_official_checkpoints(call, answer, tmp_path):
    assert_refused(lambda: call(tmp_path), answer)
    assert not (tmp_path / "executed").exists(), "the checkpoint's code was executed"


@mistakes(OTHERS)
def test_other_mistakes(call, answer):
    assert_refused(lambda: call(saved("longhorn")), answer)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (tensors_of(lambda tensors: tensors.pop("model.norm.weight")), "missing_keys"),
        (tensors_of(lambda tensors: tensors.update(more=torch.zeros(1))), "unexpected_keys"),
        (json_of(CONFIG, num_hidden_layers=1, block_types=["linear_attention"]), "unexpected_keys"),
    ],
)
def test_what_the_loading_report_names(change, kind, tmp_path):
    """Nothing is raised, as everywhere in transformers."""
    folder = changed(tmp_path, change)
    assert AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)[1][kind]


def test_configurations_raise_nothing_for_what_nobody_reads():
    assert json.loads(AutoConfig.for_model("longhorn", hiden_size=64).to_json_string())["hiden_size"] == 64
    AutoConfig.for_model("longhorn", vocab_size=9, eos_token_id=50256)  # generation never meets it
