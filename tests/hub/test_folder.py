"""Cut off, missing, changed or foreign files of a checkpoint are found without loading it."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub import check_folder
from tests.cli.folders import save_checkpoint
from tests.tiny_models import build


@pytest.fixture
def sharded(tmp_path):
    return save_checkpoint(tmp_path / "folder", max_shard_size="8KB", export_code=True)


def test_counts(tmp_path):
    model = build("longhorn", "LonghornForCausalLM")
    model.save_pretrained(tmp_path, max_shard_size="8KB", export_code=True)
    found = check_folder(tmp_path)
    weights = dict(model.named_parameters())  # tied weights are stored once
    assert found["tensors"] == len(weights) and found["files"] > 1 and found["code"] > 5
    assert found["bytes"] == sum(weight.numel() * weight.element_size() for weight in weights.values())


def first_shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def exchange(folder):
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    first.write_bytes(second.read_bytes())


def repeat(folder):
    """The second shard also has a tensor of the first, as an index cannot say."""
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    save_file(load_file(second) | dict(list(load_file(first).items())[:1]), second)


def edit(name, change):
    """A change of a JSON file, in place."""

    def edited(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edited


def config(**fields):
    return edit("config.json", lambda saved: saved.update(fields))


NORM = "model.norm.weight"


def norm(change):
    """Other tensors in place of the last norm, in its file."""

    def edited(folder):
        file = folder / json.loads((folder / INDEX).read_text())["weight_map"][NORM]
        tensors = load_file(file)
        save_file(tensors | change(tensors.pop(NORM)), file, metadata={"format": "pt"})

    return edited


def more_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"new{number}" for number in range(9)])
    tokenizer.save_pretrained(folder)


def without_norm(folder):
    norm(lambda value: {})(folder)
    edit(INDEX, lambda index: index["weight_map"].pop(NORM))(folder)


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def append(name, content):
    return lambda folder: (folder / name).write_text((folder / name).read_text() + content)


def remove(pattern):
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


INDEX, CODE = SAFE_WEIGHTS_INDEX_NAME, "modeling_longhorn.py"
CUT_OFF = "is not a complete safetensors file"
CHANGED = r"modeling_longhorn\.py was not written by export_code, or was changed since"
DAMAGE = {
    "cut": (lambda f: first_shard(f).write_bytes(first_shard(f).read_bytes()[:-5]), CUT_OFF),
    "a cut header": (lambda f: first_shard(f).write_bytes(b"\x07"), CUT_OFF),
    "pickled": (lambda f: first_shard(f).write_bytes(b"\x80\x04N."), CUT_OFF),
    "lost": (lambda f: first_shard(f).unlink(), "is missing"),
    "exchanged": (exchange, "lacks the tensor"),
    "twice": (repeat, r"holds '[\w.]+', which model-00001-of-\d+\.safetensors holds too"),
    "a file outside": (
        edit(INDEX, lambda index: index["weight_map"].update(a="../other.safetensors")),
        r"'\.\./other",
    ),
    "no map": (edit(INDEX, lambda index: index.pop("weight_map")), "has no weight_map"),
    "no JSON": (write(INDEX, "{"), "is not valid JSON"),
    "no object": (write("config.json", "[]"), "must hold a JSON object, not list"),
    "no configuration": (remove("config.json"), r"has no config\.json"),
    "changed code": (append(CODE, "\n"), CHANGED),
    "a changed head": (lambda f: write(CODE, "import os\n" + (f / CODE).read_text())(f), CHANGED),
    "more code": (write("more.py", ""), r"more\.py was not written by export_code"),
    "less code": (remove("layers.py"), r"lacks the code file layers\.py that \w+\.py names"),
    "no entry": (remove("configuration_longhorn.py"), r"configuration_longhorn\.py that config\.json names"),
    "no code": (remove("*.py"), r"lacks the code file \w+\.py that config\.json names"),
    "no table": (config(auto_map=["a.B"]), "auto_map must say a file and class"),
    "code outside": (config(auto_map={"AutoModel": "/etc/code.Model"}), r"lacks the code file /etc/code\.py"),
}
FOREIGN = {
    "truncated tokenizer": (write("tokenizer.json", "{"), r"tokenizer\.json is not valid JSON"),
    "foreign tokenizer": (write("tokenizer.json", "{}"), r"tokenizer\.json holds no tokenizer"),
    "more tokens": (more_tokens, "it belongs to another model"),
    "pickled weights beside": (write("pytorch_model.bin", "x"), r"pytorch_model\.bin is left from another save"),
    "shard beside": (
        lambda f: shutil.copy(first_shard(f), f / "model-00001-of-00099.safetensors"),
        r"model-00001-of-00099\.safetensors is left from another save",
    ),
    "missing tensor": (without_norm, r"no weight file holds .*model\.norm\.weight"),
    "foreign tensor": (
        norm(lambda value: {NORM: value, "encoder.x": value.clone()}),
        r"safetensors holds encoder\.x, which LonghornForCausalLM does not have",
    ),
    "foreign shape": (
        norm(lambda value: {NORM: torch.zeros(7)}),
        r"model\.norm\.weight has shape \(7,\), but LonghornForCausalLM needs \(24,\)",
    ),
    "foreign architecture": (
        config(architectures=["MambaForCausalLM"]),
        r"config\.json names the architecture 'MambaForCausalLM', but 'longhorn' has LonghornModel",
    ),
    "foreign family": (config(model_type="llama"), "model_type='llama' is not a family"),
    "small vocabulary": (config(vocab_size=200), r"no weight file|has shape \(\d+, 24\), but"),
}


@pytest.mark.parametrize("damage", [*DAMAGE, *FOREIGN])
def test_damage_is_named(sharded, damage, capsys):
    change, expected = (DAMAGE | FOREIGN)[damage]
    change(sharded)
    if damage in DAMAGE:
        with pytest.raises(ValueError, match=expected):
            check_folder(sharded)
    capsys.readouterr()
    assert main(["check", str(sharded)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("refused: ") and re.search(expected, said), said
    assert main(["check", str(sharded), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["complete"] is False


@pytest.mark.parametrize(
    "old, new", [("^", "module."), ("^", "_orig_mod."), ("^", "model.model."), ("^model.", "model._orig_mod.")]
)
def test_weights_none_of_which_are_the_models_are_refused(tmp_path, old, new):
    """Saved from DDP, a compiled model or a trainer's module; a checkpoint of this very class."""
    build("longhorn", "LonghornForCausalLM").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({re.sub(old, new, name): value for name, value in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"was saved from a wrapper, as its '{new}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_code_that_another_repository_holds_is_not_looked_for(sharded):
    remove("*.py")(sharded)
    config(auto_map={"AutoModel": "someone/longhorn--modeling_longhorn.LonghornModel"})(sharded)
    assert check_folder(sharded)["code"] == 0
