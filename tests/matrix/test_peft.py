"""PEFT

A few steps lower the loss, the saved adapter gives the same logits when loaded, generation with it does not depend on
the cache, and the merged weights give its logits to 1e-4 of the largest. LoRA, DoRA and IA3 sit on every linear map
(`"all-linear"`); the defaults name no module at all, and no adapter may then sit in the recurrence. Prompt tuning has
nothing to merge.
"""

import subprocess
import sys

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.utils import constants

from hf_hybrid_ssm.auto import FAMILIES, register
from tests.matrix.checks import assert_near, check_generation, logits_of, loss_before_and_after, rows, saved
from tests.memory import in_own_memory
from tests.tiny_models import ROWS, batch_of, own_language_model

# parameters that make the recurrence, by the module that holds them; no adapter of the defaults may sit in one
RECURRENCE = ("ssm", "memory", "recurrent", "x_proj", "dt_proj")
SOME = ("longhorn", "bst mh s4", "encoder-decoder")


def _train_save_merge(row, config, learning_rate, merges=True, steps=8):
    base = own_language_model(row)
    before = logits_of(base, row)
    config.task_type = "SEQ_2_SEQ_LM" if base.config.is_encoder_decoder else "CAUSAL_LM"
    model = get_peft_model(own_language_model(row), config)
    first, last = loss_before_and_after(model, batch_of(row), steps, learning_rate)
    assert last < 0.99 * first, f"the loss did not fall: {first:.3f} to {last:.3f}"
    trained = logits_of(model, row)
    if merges:
        moved = (trained - before).abs().max() / before.abs().max()
        assert moved > 1e-2, f"the adapter moved the logits by {moved:.1e} of the largest, too little to test a merge"
    with saved(model) as folder:
        loaded = in_own_memory(PeftModel.from_pretrained(base, folder).eval())
    assert torch.equal(logits_of(loaded, row), trained), "the loaded adapter gives other logits"
    check_generation(loaded, row)
    if merges:
        merged = loaded.merge_and_unload()
        assert_near(logits_of(merged, row), trained, 1e-4, "merged weights")
        assert not [name for name, _ in merged.named_parameters() if "lora" in name or "ia3" in name]
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _in_the_recurrence(names):
    return [name for name in names if set(name.split(".")) & set(RECURRENCE)]


@rows()
def test_lora(row):
    _train_save_merge(row, LoraConfig(r=2, target_modules="all-linear"), 2e-2)


@rows(*SOME)
def test_dora(row):
    _train_save_merge(row, LoraConfig(r=2, target_modules="all-linear", use_dora=True), 2e-2)


@rows(*SOME)
def test_ia3(row):
    _train_save_merge(row, IA3Config(target_modules="all-linear", feedforward_modules=[]), 0.2)


@rows(*SOME)
def test_prompt_tuning(row):
    _train_save_merge(row, PromptTuningConfig(num_virtual_tokens=3), 0.3, merges=False, steps=20)


@rows(*ROWS)
def test_lora_with_default_modules(row):
    assert _in_the_recurrence(_train_save_merge(row, LoraConfig(r=2), 5e-2)) == []


@rows(*ROWS)
def test_ia3_with_default_modules(row):
    assert _in_the_recurrence(_train_save_merge(row, IA3Config(), 0.2)) == []


def test_peft_learns_the_families_when_it_is_imported():
    lines = """
import sys, hf_hybrid_ssm
assert "peft" not in sys.modules and "torch" not in sys.modules
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as lora
assert "hf_hybrid_ssm.models.longhorn.modeling_longhorn" not in sys.modules
assert all(family.model_type in lora for family in hf_hybrid_ssm.FAMILIES)
assert lora["llama"] == ["q_proj", "v_proj"]
"""
    subprocess.run([sys.executable, "-c", lines], check=True)


def test_families_enter_tables_that_are_there_already(monkeypatch):
    tables = [name for name in vars(constants) if name.endswith(("_TARGET_MODULES_MAPPING", "_MODULES_MAPPING"))]
    ours = {family.model_type for family in FAMILIES}
    full = {name: dict(getattr(constants, name)) for name in tables}
    for name in tables:
        known = {key: value for key, value in full[name].items() if key not in ours}
        monkeypatch.setattr(constants, name, known | {"bst": ["PEFT's own"]} if "IA3" in name else known)
    register()
    for name in tables:
        expected = full[name] | {"bst": ["PEFT's own"]} if "IA3" in name else full[name]
        assert getattr(constants, name) == expected, name
    assert "longhorn" in constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING


def test_an_adapter_in_the_recurrence_is_found():
    assert _in_the_recurrence(["base.layers.0.mixer.x_proj.lora_A", "base.layers.0.mixer.in_proj.lora_A"]) == [
        "base.layers.0.mixer.x_proj.lora_A"
    ]
    with pytest.raises(AssertionError, match="did not fall"):
        _train_save_merge("lmu-isa", LoraConfig(r=2), 0.0)
