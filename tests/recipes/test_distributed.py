"""Two processes equal one: the recipe as `accelerate launch` starts it; FSDP2 is in tests/upstream."""

import json
import re
import shutil
import sys

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from safetensors.torch import load_file

from tests.recipes.launching import RECIPES, launched
from tests.recipes.small import write_lines

RECIPE = RECIPES / "pretrain_clm.py"
PRESETS = RECIPES / "configs/accelerate"


def test_two_processes(tmp_path):
    texts = [{"text": f"line {number} of a short text that counts to {number + 1}"} for number in range(200)]
    write_lines(tmp_path / "texts.jsonl", texts)
    settings = f"""
model_type: longhorn
config: {{hidden_size: 16, num_hidden_layers: 1, state_size: 4}}
train_files: [{tmp_path}/texts.jsonl]
sequence_length: 32
tokenizer_vocab_size: 300
max_steps: 4
learning_rate: 1.0e-2
logging_steps: 1
save_steps: 2
report_to: none
use_cpu: true
"""
    (tmp_path / "settings.yaml").write_text(settings, encoding="utf-8")
    recipe = [RECIPE, tmp_path / "settings.yaml"]
    two = [sys.executable, *recipe, f"output_dir={tmp_path}/two", "per_device_train_batch_size=2", "ddp_backend=gloo"]
    assert len(re.findall(r"\| model type +\| +longhorn \|", launched(two, ranks=2))) == 1
    launched([sys.executable, *recipe, f"output_dir={tmp_path}/one", "per_device_train_batch_size=4"])
    found = [json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8")) for name in ("one", "two")]
    assert found[0]["tokens"] == found[1]["tokens"] == 4 * 32 * 4
    assert found[0]["train_loss"] == pytest.approx(found[1]["train_loss"], rel=1e-5)
    assert found[0]["validation_loss"] == pytest.approx(found[1]["validation_loss"], rel=1e-5)
    # half-way, one process takes up what two have saved
    shutil.copytree(tmp_path / "two/checkpoint-2", tmp_path / "resumed/checkpoint-2")
    resumed = [f"output_dir={tmp_path}/resumed", "per_device_train_batch_size=4", "resume=auto"]
    launched([sys.executable, *recipe, *resumed])
    losses = [steps_of(tmp_path / name / "checkpoint-4") for name in ("one", "two", "resumed")]
    assert list(losses[0]) == [1, 2, 3, 4]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)
    one, *others = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "resumed"))
    for other in others:
        for key, weights in one.items():
            torch.testing.assert_close(other[key], weights, rtol=1e-4, atol=1e-5)


def steps_of(checkpoint):
    """The loss of each step, as the Trainer logged it."""
    history = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_what_accelerate_reads(preset):
    """Every key is known to `accelerate launch`, and becomes the setting it names."""
    config = load_config_from_file(str(preset))
    arguments = launch_command_parser().parse_args(["--config_file", str(preset), "recipe.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert defaults.distributed_type == config.distributed_type and arguments.num_processes == 8
    kinds = {
        "ddp": "multi_gpu",
        "fsdp2": "use_fsdp",
        "deepspeed_zero2": "use_deepspeed",
        "deepspeed_zero3": "use_deepspeed",
    }
    assert getattr(arguments, kinds[preset.stem])
    content = yaml.safe_load(preset.read_text(encoding="utf-8"))
    for key, value in {**content.get("fsdp_config", {}), **content.get("deepspeed_config", {})}.items():
        assert str(getattr(arguments, key)).lower() == str(value).lower(), key
    if file := content.get("deepspeed_config", {}).get("deepspeed_config_file"):
        found = json.loads((RECIPES.parent / file).read_text(encoding="utf-8"))
        assert found["zero_optimization"]["stage"] == int(preset.stem[-1])
        assert found["torch_autocast"]["enabled"] and not found["bf16"]["enabled"]  # which rounds the weights
