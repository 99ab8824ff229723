"""PEFT

A few steps lower the loss, the saved adapter gives the same logits when loaded, generation with it does not depend on
the cache, and the merged weights give its logits to 1e-4 of the largest. LoRA, DoRA and IA3 sit on every linear map
(`"all-linear"`); the defaults name no module at all, and no adapter may then sit in the recurrence. Prompt tuning has
nothing to merge.
"""

import sys

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from peft.utils import constants

from hf_hybrid_ssm.auto import register
from hf_hybrid_ssm.models import FAMILIES
from tests import processes
from tests.matrix.checks import EVERY_FAMILY, GREEDY, assert_near, cells, check_generation, logits_of
from tests.memory import in_own_memory
from tests.tiny_models import ROWS, VARIANTS, batch_of, build, classes_of, inputs_for, own_language_model

# parameters that make the recurrence, by the module that holds them; no adapter of the defaults may sit in one
RECURRENCE = {"ssm", "memory", "recurrent", "x_proj", "dt_proj"}
ALL = {"target_modules": "all-linear"}
# column → rows of `make test`, the configuration, the learning rate
METHODS = {
    "LoRA": (dict.fromkeys([*EVERY_FAMILY, *VARIANTS]), lambda: LoraConfig(r=2, **ALL), 2e-2),
    "DoRA": (EVERY_FAMILY, lambda: LoraConfig(r=2, use_dora=True, **ALL), 2e-2),
    "IA3": (EVERY_FAMILY, lambda: IA3Config(feedforward_modules=[], **ALL), 0.2),
    "prompt tuning": (EVERY_FAMILY, lambda: PromptTuningConfig(num_virtual_tokens=3), 0.3),
    "LoRA, default modules": (ROWS, lambda: LoraConfig(r=2), 5e-2),
    "IA3, default modules": (ROWS, lambda: IA3Config(), 0.2),
}


def _in_the_recurrence(model):
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # a student's `memory` is a whole mixer
    return [name for name in trained if set(name.replace(".self_attn.memory.", ".").split(".")) & RECURRENCE]


def _losses(model, inputs, steps, learning_rate):
    """Before and after a few AdamW steps on one batch, over whatever is trainable; both without dropout."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    with torch.no_grad():
        before = model.eval()(**inputs).loss
    model.train()
    for _ in range(steps):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return before, model.eval()(**inputs).loss


@cells({column: quick for column, (quick, *_) in METHODS.items()})
def test_adapter(column, row, tmp_path):
    _, make, learning_rate = METHODS[column]
    merges = column != "prompt tuning"
    base, config = own_language_model(row), make()
    before = logits_of(base, row)
    config.task_type = "SEQ_2_SEQ_LM" if base.config.is_encoder_decoder else "CAUSAL_LM"
    base_again = own_language_model(row)
    torch.manual_seed(0)  # of the adapter's first values, whatever ran before
    model = get_peft_model(base_again, config)
    assert "default" not in column or _in_the_recurrence(model) == []
    first, last = _losses(model, batch_of(row), 8 if merges else 20, learning_rate)
    assert last < 0.99 * first, f"the loss did not fall: {first:.3f} to {last:.3f}"
    trained = logits_of(model, row)
    model.save_pretrained(tmp_path)
    loaded = in_own_memory(PeftModel.from_pretrained(base, tmp_path).eval())
    assert torch.equal(logits_of(loaded, row), trained), "the loaded adapter gives other logits"
    check_generation(loaded, row)
    if merges:
        moved = (trained - before).abs().max() / before.abs().max()
        assert moved > 1e-2, f"the adapter moved the logits by {moved:.1e} of the largest, too little to test a merge"
        merged = loaded.merge_and_unload()
        assert_near(logits_of(merged, row), trained, 1e-4, "merged weights")
        assert not [name for name, _ in merged.named_parameters() if "lora" in name or "ia3" in name]


@pytest.mark.parametrize("row", [*ROWS, "bst block-recurrent", "bst with memory", "bst s5 bidirectional"])
def test_several_adapters_in_one_batch(row):
    """`adapter_names`: each row of the batch has its own, or none, when it is read and when it is generated."""
    bidirectional = "bidirectional" in row
    model = build(row, "BstForMaskedLM") if bidirectional else own_language_model(row)
    torch.manual_seed(1)
    tuned = get_peft_model(model, _drawn(), adapter_name="first")
    tuned.add_adapter("second", _drawn())
    tuned.eval()
    names = ["second", "first", "__base__"]
    inputs = {name: x for name, x in batch_of(row, rows=3).items() if name != "labels"}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :5]
    with torch.no_grad():
        mixed = tuned(**inputs, adapter_names=names).logits
        alone = [_with_adapter(tuned, name, lambda: tuned(**inputs).logits) for name in names]
    assert not torch.allclose(alone[0], alone[1]) and not torch.allclose(alone[0], alone[2])
    for index, logits in enumerate(alone):
        assert_near(mixed[index], logits[index], 1e-5, f"row {index}, {names[index]}")
    if bidirectional:
        return
    prompt = {"input_ids": inputs["input_ids"][:, :7], "max_new_tokens": 8, "min_new_tokens": 8, **GREEDY}
    texts = tuned.generate(**prompt, adapter_names=names)
    for index, name in enumerate(names):
        text = _with_adapter(tuned, name, lambda: tuned.generate(**prompt))
        assert texts[index].tolist() == text[index].tolist(), name


def _drawn():
    return LoraConfig(r=2, init_lora_weights=False, **ALL)


def _with_adapter(tuned, name, call):
    if name == "__base__":
        with tuned.disable_adapter():
            return call()
    tuned.set_adapter(name)
    return call()


@pytest.mark.parametrize("row", EVERY_FAMILY)
def test_prefix_tuning_is_refused_with_what_works_instead(row):
    """It puts keys and values before the text; a state has no place for them."""
    model = own_language_model(row)
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    tuned = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=3, task_type=task))
    inputs = batch_of(row)
    with pytest.raises(ValueError, match=r"prefix tuning\) has no place before a state: use prompt tuning"):
        tuned(**inputs)
    works = get_peft_model(own_language_model(row), PromptEncoderConfig(num_virtual_tokens=3, task_type=task))
    assert works(**inputs).loss.isfinite()


TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForMultipleChoice": "SEQ_CLS",  # PEFT has no task of its own for it
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForMaskedLM": None,
    "Model": "FEATURE_EXTRACTION",
}
HEADS = [(row, name) for row in [*EVERY_FAMILY, "bst s5 bidirectional"] for name in classes_of(row)]


@pytest.mark.parametrize("targets", ["default", "linear maps of the base"])
@pytest.mark.parametrize(("row", "name"), HEADS)
def test_a_saved_adapter_has_the_whole_head(row, name, targets, tmp_path):
    """What is new beside the base model's weights is trained, so the adapter's folder holds it: elsewhere it starts
    with other values."""
    base = build(row, name)
    of_base = base if name.endswith(("LM", "ConditionalGeneration")) else base.base_model
    of_base.save_pretrained(tmp_path / "base")

    def loaded(seed):
        torch.manual_seed(seed)
        return in_own_memory(classes_of(row)[name].from_pretrained(tmp_path / "base"))

    first, second = loaded(1), loaded(2)
    new = {key for key, value in first.state_dict().items() if not torch.equal(value, second.state_dict()[key])}
    assert bool(new) == ("Classification" in name or "Choice" in name or "Answering" in name)
    task = next(task for ending, task in TASKS.items() if name.endswith(ending))
    linear = [key for key, module in first.base_model.named_modules() if isinstance(module, torch.nn.Linear)]
    config = LoraConfig(task_type=task, target_modules=None if targets == "default" else linear, r=2)
    model = get_peft_model(first, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.eval().save_pretrained(tmp_path / "adapter")
    again = in_own_memory(PeftModel.from_pretrained(second, tmp_path / "adapter").eval())
    inputs = inputs_for(base)
    with torch.no_grad():
        for expected, got in zip(model(**inputs).to_tuple(), again(**inputs).to_tuple()):
            if isinstance(expected, torch.Tensor):
                assert torch.equal(expected, got)


def test_peft_learns_the_families_when_it_is_imported():
    lines = """
import sys, hf_hybrid_ssm
assert "peft" not in sys.modules and "transformers.modeling_utils" not in sys.modules
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as lora
assert "hf_hybrid_ssm.models.longhorn.modeling_longhorn" not in sys.modules
assert all(family.model_type in lora for family in hf_hybrid_ssm.FAMILIES)
assert lora["llama"] == ["q_proj", "v_proj"]
"""
    processes.run([sys.executable, "-c", lines], check=True, with_transformers=False)


def test_families_enter_tables_that_are_there_already(monkeypatch):
    tables = [name for name in vars(constants) if name.endswith(("_TARGET_MODULES_MAPPING", "_MODULES_MAPPING"))]
    ours = {family.model_type for family in FAMILIES}
    full = {name: dict(getattr(constants, name)) for name in tables}
    theirs = {name: {"bst": ["PEFT's own"]} if "IA3" in name else {} for name in tables}
    for name in tables:
        known = {key: value for key, value in full[name].items() if key not in ours}
        monkeypatch.setattr(constants, name, known | theirs[name])
    register()
    for name in tables:
        assert getattr(constants, name) == full[name] | theirs[name], name
    assert "longhorn" in constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
