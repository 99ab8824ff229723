#!/usr/bin/env bash
# from_pretrained overwrites a trained parameter that the checkpoint has, if _init_weights writes it through
# .data (as models written for transformers 4 do) and its module also has a buffer that is not saved, or any
# tensor that is missing: the whole module counts as new then. The parameter is not reported. The functions of
# transformers.initialization leave loaded tensors alone.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import math

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as init


class Config(PretrainedConfig):
    model_type = "decay"


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(4))
        self.register_buffer("positions", torch.arange(4.0), persistent=False)


class Written(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.mixer = Mixer()
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, Mixer):
            module.A_log.data.fill_(math.log(4.0))


class Guarded(Written):
    def _init_weights(self, module):
        if isinstance(module, Mixer):
            init.constant_(module.A_log, math.log(4.0))


print("torch", torch.__version__, "transformers", transformers.__version__)
seen = {}
for kind in (Written, Guarded):
    model = kind(Config())
    model.mixer.A_log.data.fill_(2.0)  # as training has left it
    model.save_pretrained("saved")
    loaded, info = kind.from_pretrained("saved", output_loading_info=True)
    seen[kind.__name__] = loaded.mixer.A_log[0].item()
    assert not any(info.values())
print("expected: 2.0, what the checkpoint holds, in both")
print("seen: through .data", round(seen["Written"], 4), "by transformers.initialization", seen["Guarded"])
assert abs(seen["Written"] - math.log(4.0)) < 1e-6 and seen["Guarded"] == 2.0
PYTHON
