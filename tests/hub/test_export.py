"""Folders that carry their code: loaded where the package is not, the same answers to the bit, and what is refused."""

import ast
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM

import hf_hybrid_ssm
from hf_hybrid_ssm.hub import check_folder, export_code
from hf_hybrid_ssm.hub.export import auto_class_of, code_of
from hf_hybrid_ssm.hub.verify_files import seal
from hf_hybrid_ssm.models import FAMILIES
from hf_hybrid_ssm.ops.core.dispatch import backend
from tests import processes
from tests.hub.without_package import answer
from tests.memory import in_own_memory
from tests.reliability.test_security import findings
from tests.serving.students import EVERY_STUDENT, student_model
from tests.tiny_models import build

VARIANTS = {
    "longhorn": "longhorn + window and full attention",
    "bst": "bst mh s4",
    "lmu_isa": "lmu-isa + window attention",
    "spade": "spade s4 trained",
    "spade_seq2seq": "encoder-decoder relative window",
    "hybrid_student": "student with a mixer beside groups",
}
EVERY = pytest.mark.parametrize("model_type", VARIANTS)
SCRIPT = Path(__file__).parent / "without_package.py"


def class_of(model_type):
    if model_type == "hybrid_student":
        return "HybridStudentForCausalLM"
    return "SpadeForConditionalGeneration" if model_type == "spade_seq2seq" else f"{names()[model_type]}ForCausalLM"


def names():
    return {family.model_type: family.config.removesuffix("Config") for family in FAMILIES}


def run_elsewhere(root, *arguments):
    """What Python prints that has only what is installed on its path, and modules of other folders below `root`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1"}
    ran = processes.run([sys.executable, *arguments], env=environment, cwd=root)
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every family, saved with its code, and what a process without the package made of it."""
    root = tmp_path_factory.mktemp("exported")
    for model_type, variant in VARIANTS.items():
        model = student_model(variant) if variant in EVERY_STUDENT else build(variant, class_of(model_type))
        model.save_pretrained(root / model_type, export_code=True)
    run_elsewhere(root, SCRIPT, *(root / model_type for model_type in VARIANTS))
    return root


@EVERY
def test_same_answers_without_the_package(folders, model_type):
    auto = AutoModelForSeq2SeqLM if model_type == "spade_seq2seq" else AutoModelForCausalLM
    model = in_own_memory(auto.from_pretrained(folders / model_type, trust_remote_code=True).eval())
    assert isinstance(model, getattr(hf_hybrid_ssm, class_of(model_type)))  # the installed class wins
    with backend("torch"):
        here = answer(model, torch.arange(3, 27).view(2, 12))
    there = load_file(folders / model_type / "answers")
    assert torch.equal(here["logits"], there["logits"]) and torch.equal(here["text"], there["text"])


@EVERY
def test_a_folder_saved_again_keeps_every_head_and_file(folders, model_type):
    again = folders / model_type / "again"
    configs = [json.loads((folder / "config.json").read_text()) for folder in (folders / model_type, again)]
    assert configs[0]["auto_map"] == configs[1]["auto_map"]
    assert check_folder(again)["code"] == len(code_of(model_type))


@EVERY
def test_the_same_bytes_twice_and_few_files(folders, model_type, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folders / model_type, copy)
    before = {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}
    export_code(copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()} == before
    assert len(list(copy.glob("*.py"))) <= 15
    assert check_folder(copy)["code"] == len(code_of(model_type))


@EVERY
def test_code_is_flat_licensed_and_harmless(model_type):
    for name, text in code_of(model_type).items():
        licence = "# Copyright 2026 The hf-hybrid-ssm contributors.\n# SPDX-License-Identifier: Apache-2.0\n"
        assert text.startswith(licence) and text.count("Copyright") == 1
        assert findings("--stdin-filename", name, "-", source=text) == ""
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.ImportFrom):
                assert node.module and (
                    node.level == 0 or (node.level == 1 and f"{node.module}.py" in code_of(model_type))
                )
                names = [node.module] if node.level == 0 else []
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            packages = {name.split(".")[0] for name in names} - sys.stdlib_module_names
            assert packages <= {"torch", "transformers", "huggingface_hub"}


def test_every_table_of_heads_has_its_auto_class():
    for family in FAMILIES:
        for table in family.heads:
            assert hasattr(transformers, auto_class_of(table))


@pytest.fixture
def saved(tmp_path):
    build("longhorn", "LonghornForCausalLM").save_pretrained(tmp_path / "saved", export_code=True)
    return tmp_path / "saved"


def test_nothing_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json: save the model there first"):
        export_code(build("longhorn", "LonghornForCausalLM"), tmp_path)
    with pytest.raises(ValueError, match="folder is needed"):
        export_code(build("longhorn", "LonghornForCausalLM"))
    with pytest.raises(TypeError, match="not int"):
        export_code(3)
    assert list(tmp_path.iterdir()) == []


def test_foreign_models_are_refused(saved, tmp_path):
    config = LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="model_type='llama' is not a family"):
        export_code(tmp_path / "llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a class of the family 'longhorn'"):
        export_code(model, saved)


def test_a_name_that_transformers_owns_is_refused(saved, monkeypatch):
    monkeypatch.setattr("hf_hybrid_ssm.hub.export.owner_of", lambda family: "TheirConfig")
    with pytest.raises(ValueError, match=r"model type 'longhorn' of its own \(TheirConfig\)"):
        export_code(saved)


@pytest.mark.parametrize("name", ["modeling_longhorn.py", "mine.py"])
def test_other_code_is_not_overwritten(saved, name):
    (saved / name).write_text("# mine\n")
    with pytest.raises(ValueError, match=f"{name} was not written by export_code"):
        export_code(saved)
    assert (saved / name).read_text() == "# mine\n"


def test_code_of_an_older_version_is_replaced(saved):
    name = next(name for name in code_of("longhorn") if name.endswith("dispatch.py"))
    (saved / name).write_text(seal("# head\n", "# older\n"))
    export_code(saved)
    assert (saved / name).read_text() == code_of("longhorn")[name]
    assert check_folder(saved)["code"] == len(code_of("longhorn"))


BASE = """
import sys
sys.modules["hf_hybrid_ssm"] = None
from transformers import AutoModel
for folder in sys.argv[1:]:
    model, report = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not report["missing_keys"], report
    model.save_pretrained(folder + "-again")
    for each in (model, AutoModel.from_pretrained(folder + "-again", trust_remote_code=True)):
        print(type(each).__name__, type(each).__module__.startswith("transformers_modules"))
"""
BASES = {
    "SpadeForCausalLM": "SpadeModel",
    "SpadeForTokenClassification": "SpadeEncoderModel",
    "SpadeSeq2SeqForSequenceClassification": "SpadeSeq2SeqEncoderModel",
}


def test_the_base_of_an_exported_checkpoint_is_what_the_folder_holds(tmp_path):
    for name in BASES:
        variant = "encoder-decoder" if "Seq2Seq" in name else "spade s4 window"
        build(variant, name).save_pretrained(tmp_path / name, export_code=True)
    printed = run_elsewhere(tmp_path, "-c", BASE, *(tmp_path / name for name in BASES))
    assert printed.splitlines() == [f"{base} True" for base in BASES.values() for _ in range(2)]
