"""What a teacher's folder can do to whoever opens it: nothing, as that of a hybrid (`tests/cli/hostile.py`).

It is refused in one line, before transformers sees it, and so it is as the teacher of a delta.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_hybrid_ssm.hub.verify import check_contents
from hf_hybrid_ssm.upcycle import Keep, load_teacher, save_delta, upcycle
from tests.cli.hostile import HOSTILE, Hostile, edited
from tests.upcycle.teacher_files import in_cache, save_teacher

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pipes, and links are not for everybody")
OF_HYBRIDS = {
    "transformers_weights names a part",  # then the names of tensors say what is missing
    "an adapter of LORA without weights",  # any is refused
    "an adapter of XLORA without weights",
    "configuration_longhorn.py links to new.py",
}


def _pickled(folder: Path, _: Path) -> None:
    """Of harmless tensors."""
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, folder / "pytorch_model.bin")


def _adapter(folder: Path, _: Path) -> None:
    saved = {"peft_type": "LORA", "base_model_name_or_path": "someone/else"}
    (folder / "adapter_config.json").write_text(json.dumps(saved))


def _shards(folder: Path, _: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "shard-00001-model-00001-of-00001.safetensors")


CONFIG = r"config\.json: "
# which raise errors of many kinds as transformers builds the model
IMPOSSIBLE = {"num_key_value_heads": 0, "num_attention_heads": 0, "head_dim": 0, "hidden_act": "x", "hidden_size": -1}


def _impossible(name: str, value: object) -> Hostile:
    return Hostile(f"{name}={value!r}", lambda folder, _: edited(folder / "config.json", **{name: value}), CONFIG, ())


OWN = (
    Hostile("pickled weights", _pickled, "pytorch_model.bin holds pickled weights, which are not read", ()),
    Hostile("an adapter", _adapter, "adapter_config.json is an adapter beside a model: merge it", ()),
    Hostile("shards of processes", _shards, "is a part of a checkpoint that several processes saved", ()),
    *(_impossible(name, value) for name, value in (IMPOSSIBLE | {"pad_token_id": 999}).items()),
)
ALL = [hostile for hostile in (*HOSTILE, *OWN) if hostile.name not in OF_HYBRIDS]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """In bfloat16, as the weights that `HOSTILE` speaks of."""
    folder = save_teacher(tmp_path_factory.mktemp("hostile") / "teacher")
    load_teacher(folder, torch.bfloat16).model.save_pretrained(folder)
    for name in ("notes.json", "README.md", "SHA256SUMS", "x.py"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def transformers_sees_nothing(monkeypatch):
    def asked(*arguments, **_):
        raise AssertionError(f"asked for {arguments}")

    for each in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(each, "from_pretrained", asked)


def changed(hostile, teacher, tmp_path):
    folder, outside = shutil.copytree(teacher, tmp_path / "teacher"), tmp_path / "outside"
    outside.mkdir()
    hostile.change(folder, outside)
    return folder


@pytest.mark.parametrize("hostile", ALL, ids=lambda hostile: hostile.name)
@pytest.mark.usefixtures("transformers_sees_nothing")
def test_a_hostile_folder_is_refused_in_one_line(hostile, teacher, tmp_path):
    folder = changed(hostile, teacher, tmp_path)
    with pytest.raises((ValueError, OSError), match=hostile.message) as error:
        load_teacher(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 2500 and "s3cret" not in str(error.value)


@pytest.mark.parametrize("hostile", [OWN[0], *HOSTILE[:2], *HOSTILE[-3:]], ids=lambda hostile: hostile.name)
def test_the_teacher_of_a_delta_is_checked_too(hostile, teacher, tmp_path):
    known = load_teacher(teacher)
    save_delta(upcycle(known, Keep([1], window=4), sink="constant")[0], tmp_path / "delta", known)
    folder = changed(hostile, teacher, tmp_path)
    with pytest.raises(ValueError, match=hostile.message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "delta", teacher=folder)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_delta_of_an_impossible_configuration_is_refused_in_one_line(name, teacher, tmp_path):
    known = load_teacher(teacher)
    save_delta(upcycle(known, Keep([1], window=4), sink="constant")[0], tmp_path / "delta", known)
    edited(tmp_path / "delta/config.json", **{name: IMPOSSIBLE[name]})
    with pytest.raises(ValueError, match=CONFIG) as error:
        check_contents(tmp_path / "delta")
    assert "\n" not in str(error.value) and len(str(error.value)) < 2500


def test_a_folder_of_the_hubs_cache_has_templates(teacher, tmp_path):
    """Its files are links to those of their contents, in folders within too."""
    folder = shutil.copytree(teacher, tmp_path / "teacher")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("short")
    snapshot = in_cache(folder, tmp_path / "hub", "someone/a-model")
    assert load_teacher(snapshot).tokenizer.chat_template["short"] == "short"


def test_configurations_of_real_models_are_no_obstacle(tmp_path, teacher):
    """What older files of well-known models say besides."""
    folder = shutil.copytree(teacher, tmp_path / "teacher")
    config = json.loads((folder / "config.json").read_text())
    older = {
        "torch_dtype": "bfloat16", "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0,
        "transformers_version": "4.30.0", "_name_or_path": "someone/a-model", "auto_map": {"AutoModel": "code.Model"},
        "architectures": ["LlamaForCausalLM"], "_attn_implementation_autoset": True, "use_cache": True,
        "id2label": {"0": "LABEL_0"}, "attn_implementation": None,
    }  # fmt: skip
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | older))
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 10000.0
    assert load_teacher(folder).config.rope_parameters["rope_theta"] == 10000.0
    assert re.search("bfloat16", str(load_teacher(folder).model.dtype))
