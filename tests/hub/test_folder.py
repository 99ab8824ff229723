"""Cut off, missing or changed files of a checkpoint are found without loading it."""

import json

import pytest
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub import check_folder
from tests.tiny_models import build


@pytest.fixture
def sharded(tmp_path):
    build("longhorn", "LonghornForCausalLM").save_pretrained(tmp_path, max_shard_size="8KB", export_code=True)
    return tmp_path


def test_counts(sharded, tmp_path):
    model = build("longhorn", "LonghornForCausalLM")
    found = check_folder(sharded)
    weights = dict(model.named_parameters())  # tied weights are stored once
    assert found["tensors"] == len(weights) and found["files"] > 1 and found["code"] > 5
    assert found["bytes"] == sum(weight.numel() * weight.element_size() for weight in weights.values())


def first_shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def cut(folder):
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:-5])
    return "not a complete safetensors file"


def cut_header(folder):
    first_shard(folder).write_bytes(b"\x07")
    return "not a complete safetensors file"


def pickled(folder):
    first_shard(folder).write_bytes(b"\x80\x04cposix\nsystem\n(S'true'\ntR.")
    return "not a complete safetensors file"


def lost(folder):
    first_shard(folder).unlink()
    return "is missing"


def exchanged(folder):
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    first.write_bytes(second.read_bytes())
    return "lacks the tensor"


def edit_index(folder, change):
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def outside(folder):
    edit_index(folder, lambda index: index["weight_map"].update({"a": "../other.safetensors"}))
    return r"points outside its folder: '\.\./other"


def no_map(folder):
    edit_index(folder, lambda index: index.pop("weight_map"))
    return "has no weight_map"


def no_json(folder):
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text("{")
    return "is not valid JSON"


def no_object(folder):
    (folder / "config.json").write_text("[]")
    return "must hold a JSON object, not list"


def no_config(folder):
    (folder / "config.json").unlink()
    return r"has no config\.json"


def changed_code(folder):
    with (folder / "modeling_longhorn.py").open("a") as file:
        file.write("\n")
    return r"modeling_longhorn\.py was not written by export_code, or was changed since"


def changed_head(folder):
    path = folder / "modeling_longhorn.py"
    path.write_text("import os\n" + path.read_text())
    return r"modeling_longhorn\.py was not written by export_code, or was changed since"


def added_code(folder):
    (folder / "more.py").write_text("")
    return r"more\.py was not written by export_code"


def lost_code(folder):
    (folder / "layers.py").unlink()
    return r"lacks the code file layers\.py that \w+\.py names"


def lost_entry(folder):
    (folder / "configuration_longhorn.py").unlink()
    return r"lacks the code file configuration_longhorn\.py that config\.json names"


def lost_all_code(folder):
    for path in folder.glob("*.py"):
        path.unlink()
    return r"lacks the code file \w+\.py that config\.json names"


def edit_auto_map(folder, value):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": value}))


def no_table(folder):
    edit_auto_map(folder, ["modeling_longhorn.LonghornModel"])
    return "auto_map must say a file and class for each Auto class"


def code_outside(folder):
    edit_auto_map(folder, {"AutoModel": "/etc/code.Model"})
    return r"lacks the code file /etc/code\.py"


DAMAGE = (
    cut, cut_header, pickled, lost, exchanged, outside, no_map, no_json, no_object, no_config, changed_code,
    changed_head, added_code, lost_code, lost_entry, lost_all_code, no_table, code_outside,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda function: function.__name__)
def test_damage_is_named(sharded, damage, capsys):
    expected = damage(sharded)
    with pytest.raises(ValueError, match=expected):
        check_folder(sharded)
    assert main(["check", str(sharded)]) == 1
    assert capsys.readouterr().err.startswith("refused: ")


def test_code_that_another_repository_holds_is_not_looked_for(sharded):
    lost_all_code(sharded)
    edit_auto_map(sharded, {"AutoModel": "someone/longhorn--modeling_longhorn.LonghornModel"})
    assert check_folder(sharded)["code"] == 0
