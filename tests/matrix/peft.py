"""PEFT: does an adapter train, come back from disk, and merge into the weights?"""

import copy
import tempfile

import peft
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model

from tests.matrix.columns import Column, Group
from tests.matrix.rows import assert_near, check_generation, logits_of, loss_before_and_after, model_of
from tests.memory import in_own_memory

# parameters that make the recurrence, by the module that holds them; no adapter of the defaults may sit in one
RECURRENCE = ("ssm", "memory", "recurrent", "x_proj", "dt_proj")


def _task(model) -> str:
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


def _train_save_merge(
    row: str, config: PeftConfig, learning_rate: float, merges: bool = True, steps: int = 8
) -> PeftModel:
    base = model_of(row)
    before = logits_of(base, row)
    config.task_type = _task(base)
    model = get_peft_model(copy.deepcopy(base), config)
    first, last = loss_before_and_after(model, row, steps, learning_rate)
    assert last < 0.99 * first, f"the loss did not fall: {first:.3f} to {last:.3f}"
    trained = logits_of(model, row)
    if merges:
        moved = (trained - before).abs().max() / before.abs().max()
        assert moved > 1e-2, f"the adapter moved the logits by {moved:.1e} of the largest, too little to test a merge"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = in_own_memory(PeftModel.from_pretrained(copy.deepcopy(base), folder).eval())
    assert torch.equal(logits_of(loaded, row), trained), "the loaded adapter gives other logits"
    check_generation(loaded, row)
    if merges:
        merged = loaded.merge_and_unload()
        assert_near(logits_of(merged, row), trained, 1e-4, "merged weights")
        assert not [name for name, _ in merged.named_parameters() if "lora" in name or "ia3" in name]
    return model


def lora(row: str) -> None:
    _train_save_merge(row, LoraConfig(r=2, target_modules="all-linear"), 2e-2)


def dora(row: str) -> None:
    _train_save_merge(row, LoraConfig(r=2, target_modules="all-linear", use_dora=True), 2e-2)


def ia3(row: str) -> None:
    _train_save_merge(row, IA3Config(target_modules="all-linear", feedforward_modules=[]), 0.2)


def prompt_tuning(row: str) -> None:
    _train_save_merge(row, PromptTuningConfig(num_virtual_tokens=3), 0.3, merges=False, steps=20)


def lora_defaults(row: str) -> None:
    model = _train_save_merge(row, LoraConfig(r=2), 5e-2)
    _check_recurrence_is_left_alone(model)


def ia3_defaults(row: str) -> None:
    model = _train_save_merge(row, IA3Config(), 0.2)
    _check_recurrence_is_left_alone(model)


def _check_recurrence_is_left_alone(model: PeftModel) -> None:
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    inside = [name for name in trained if set(name.split(".")) & set(RECURRENCE)]
    assert trained and not inside, f"an adapter sits in the recurrence: {inside}"


GROUP = Group(
    "PEFT",
    "A few steps lower the loss, the saved adapter gives the same logits when loaded, generation with it does not "
    "depend on the cache, and the merged weights give its logits to 1e-4 of the largest. LoRA, DoRA and IA3 sit on "
    'every linear map (`"all-linear"`); the last two columns name no module at all, and no adapter may then sit in '
    "the recurrence. Prompt tuning has nothing to merge.",
    tuple(
        Column(name, check, peft.__name__)
        for name, check in (
            ("LoRA", lora),
            ("DoRA", dora),
            ("IA3", ia3),
            ("prompt tuning", prompt_tuning),
            ("LoRA, default modules", lora_defaults),
            ("IA3, default modules", ia3_defaults),
        )
    ),
)
