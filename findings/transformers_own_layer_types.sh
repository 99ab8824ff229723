#!/usr/bin/env bash
# A configuration class may have layer types of its own: it overrides validate_layer_type, trains, saves and loads. But
# Trainer reads the checkpoint's config.json as the base class PreTrainedConfig to compare versions when it resumes, and
# that class refuses them: the run cannot be resumed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'accelerate==1.15.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments


@strict
class OwnConfig(PreTrainedConfig):
    model_type = "own"
    num_hidden_layers: int = 2
    layer_types: list[str] | None = None

    def validate_layer_type(self):
        assert set(self.layer_types or ()) <= {"recurrent"}


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(1, 1)
        self.post_init()

    def forward(self, x):
        return {"loss": self.linear(x).square().mean()}


AutoConfig.register("own", OwnConfig)
print("transformers", transformers.__version__, "torch", torch.__version__)


def train(steps, resumed):
    model = OwnModel(OwnConfig(layer_types=["recurrent", "recurrent"]))
    settings = {"save_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    rows = [{"x": torch.ones(1)}] * 8
    Trainer(model, TrainingArguments("out", max_steps=steps, **settings), train_dataset=rows).train(resumed)


train(1, None)
assert AutoConfig.from_pretrained("out/checkpoint-1").layer_types == ["recurrent", "recurrent"]
print("expected: what AutoConfig reads can be resumed")
try:
    train(2, "out/checkpoint-1")
except Exception as error:
    seen = f"{type(error).__name__}: {str(error).splitlines()[-1].strip()[:60]}"
else:
    seen = "resumed"
print("seen:", seen)
assert "layer_types" in seen, seen
PYTHON
