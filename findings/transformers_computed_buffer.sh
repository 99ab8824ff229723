#!/usr/bin/env bash
# A buffer that a model computes in __init__ and does not save (persistent=False), as HiPPO matrices and tables
# of positions are, holds memory that was not written after from_pretrained, which builds models on the meta
# device. Nothing is said. from_config gives the right values, so tests that do not load pass; _init_weights has
# to write such buffers again.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class Config(PretrainedConfig):
    model_type = "legendre"


class Legendre(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.map = nn.Linear(4, 4)
        self.register_buffer("a", torch.arange(4.0) + 7, persistent=False)
        self.post_init()


print("torch", torch.__version__, "transformers", transformers.__version__)
model = Legendre(Config())
model.save_pretrained("saved")
loaded, info = Legendre.from_pretrained("saved", output_loading_info=True)
print("expected: the buffer is", model.a.tolist(), "in both")
reported = {kind: names for kind, names in info.items() if names}
print("seen: built", model.a.tolist(), "loaded equal:", torch.equal(loaded.a, model.a), "reported:", reported)
assert torch.equal(loaded.map.weight, model.map.weight)
assert not torch.equal(loaded.a, model.a) and not any(info.values())
PYTHON
