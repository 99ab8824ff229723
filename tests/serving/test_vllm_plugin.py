"""The plugin without vLLM: what is imported, registered and refused. (With it: the tests in engine/.)"""

import ast
import importlib
import logging
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import hf_hybrid_ssm.serving
from hf_hybrid_ssm.models import FAMILIES, OTHERS
from hf_hybrid_ssm.serving import vllm_plugin
from tests.cli.folders import python
from tests.serving.students import EVERY_STUDENT, FULL_STUDENTS, STUDENTS, student_model
from tests.tiny_models import config_of

ROOT = Path(__file__).parents[2]


def test_nothing_is_imported_before_an_engine_asks():
    code = """
import sys
import hf_hybrid_ssm
import hf_hybrid_ssm.serving
from hf_hybrid_ssm.serving.vllm_plugin import register
print(sorted({name.split(".")[0] for name in sys.modules} & {"vllm", "torch", "transformers", "safetensors"}))
from hf_hybrid_ssm.serving import load_context
from hf_hybrid_ssm.serving.paged_states import PagedModel
print([name for name in sys.modules if "vllm" in name])
"""
    shown = python("-c", code)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == ["[]", "['hf_hybrid_ssm.serving.vllm_plugin']"]


def test_the_entry_point_and_the_class_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["hf_hybrid_ssm"].partition(":")
    assert getattr(importlib.import_module(module), function) is vllm_plugin.register
    module, _, name = vllm_plugin.MODEL.partition(":")
    text = Path(hf_hybrid_ssm.serving.__file__).with_name(f"{module.rpartition('.')[2]}.py").read_text("utf-8")
    assert name in {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


class Registry:
    def __init__(self):
        self.models = {}

    def register_model(self, name, where):
        self.models[name] = where


class Settings:
    """vLLM's class of settings, which ours goes on with."""

    done: list = []

    @classmethod
    def verify_and_update_config(cls, vllm_config):
        cls.done.append(vllm_config)


@pytest.fixture
def vllm(monkeypatch):
    """A stand-in with the four names that the plugin and its checks use."""
    root, config = ModuleType("vllm"), ModuleType("vllm.model_executor.models.config")
    root.__version__, root.ModelRegistry = vllm_plugin.TESTED_VERSIONS[0], Registry()
    config.MODELS_CONFIG_MAP, config.MambaModelConfig = {}, Settings
    monkeypatch.setitem(sys.modules, "vllm", root)
    for name in ("vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.config", config)
    yield SimpleNamespace(root=root, registry=root.ModelRegistry, settings=config.MODELS_CONFIG_MAP)
    sys.modules.pop("hf_hybrid_ssm.serving.vllm_checks", None)
    vars(hf_hybrid_ssm.serving).pop("vllm_checks", None)


def test_every_language_model_is_registered_once(vllm, caplog):
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    declared = (*FAMILIES, *OTHERS)
    wanted = {family.heads["MODEL_FOR_CAUSAL_LM"] for family in declared if "MODEL_FOR_CAUSAL_LM" in family.heads}
    assert len(wanted) == 5 and vllm.registry.models == dict.fromkeys(wanted, vllm_plugin.MODEL)
    assert set(vllm.settings) == wanted and not caplog.records
    vllm.registry.models.clear()
    vllm_plugin.register()
    assert not vllm.registry.models


def test_another_version_is_named_once(vllm, caplog):
    vllm.root.__version__ = "9.9.9+cpu"
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
        vllm_plugin.register()
    told = [record.getMessage() for record in caplog.records]
    tested = ", ".join(vllm_plugin.TESTED_VERSIONS)
    assert told == [f"hf_hybrid_ssm was tested with vLLM {tested}, and this is 9.9.9+cpu."]


def settings(model: str = "longhorn", **changed) -> SimpleNamespace:
    """vLLM's settings, as far as they are asked for: as they are by default, but for those named."""
    parallel = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
    found = {
        "parallel_config": SimpleNamespace(**{name: changed.pop(name, 1) for name in parallel}),
        "model_config": SimpleNamespace(
            quantization=changed.pop("quantization", None),
            runner_type=changed.pop("runner", "generate"),
            enable_prompt_embeds=changed.pop("enable_prompt_embeds", False),
            hf_config=config_of(model),
        ),
        "cache_config": SimpleNamespace(mamba_cache_mode=changed.pop("mamba_cache_mode", "none")),
    }
    for name in ("speculative_config", "lora_config", "kv_transfer_config"):
        found[name] = changed.pop(name, None)
    assert not changed
    return SimpleNamespace(**found)


REFUSED = {
    "tensor_parallel_size=2": {"tensor_parallel_size": 2},
    "pipeline_parallel_size=3": {"pipeline_parallel_size": 3},
    "decode_context_parallel_size=2": {"decode_context_parallel_size": 2},
    "speculative_config='ngram'": {"speculative_config": SimpleNamespace(method="ngram")},
    "enable_lora=True": {"lora_config": SimpleNamespace()},
    "quantization='fp8'": {"quantization": "fp8"},
    "runner='pooling'": {"runner": "pooling"},
    "enable_prompt_embeds=True": {"enable_prompt_embeds": True},
    "mamba_cache_mode='all'": {"mamba_cache_mode": "all"},
    "kv_transfer_config='other'": {"kv_transfer_config": SimpleNamespace(kv_connector="other")},
}


@pytest.mark.parametrize("words", REFUSED)
def test_settings_that_are_refused(words, vllm):
    vllm_plugin.register()
    (check,) = set(vllm.settings.values())
    Settings.done.clear()
    with pytest.raises(ValueError, match=re.escape(words)) as told:
        check.verify_and_update_config(settings(**REFUSED[words]))
    assert str(told.value).startswith(words) and not Settings.done


@dataclass
class ModelInfo:
    """What vLLM knows of a class."""

    is_attention_free: bool = True
    is_hybrid: bool = False


def model_settings(model: str) -> SimpleNamespace:
    config = student_model(model).config if model in EVERY_STUDENT else config_of(model)
    return SimpleNamespace(hf_config=config, _model_info=ModelInfo())


HYBRID = {"longhorn": False, "longhorn + window and full attention": True, "lmu-isa + global attention": True}
HYBRID |= dict.fromkeys(STUDENTS, False) | dict.fromkeys(FULL_STUDENTS, True)


@pytest.mark.parametrize("model", HYBRID)
def test_a_model_with_full_attention_is_a_hybrid(model, vllm):
    vllm_plugin.register()
    (check,) = set(vllm.settings.values())
    given = model_settings(model)
    check.verify_and_update_model_config(given)
    assert given._model_info == (ModelInfo(False, True) if HYBRID[model] else ModelInfo())


def test_what_full_attention_has_beside_is_refused(vllm):
    vllm_plugin.register()
    (check,) = set(vllm.settings.values())
    with pytest.raises(ValueError, match=r"layers \[0, 1\] of this 'spade' model add a learned bias by distance"):
        check.verify_and_update_model_config(model_settings("spade hyena full"))


@pytest.mark.parametrize("model", ["longhorn", "bst block-recurrent", "lmu-isa + window attention", "spade adaptive"])
def test_settings_that_are_not(model, vllm):
    vllm_plugin.register()
    (check,) = set(vllm.settings.values())
    Settings.done.clear()
    given = settings(model)
    check.verify_and_update_config(given)
    assert Settings.done == [given]
