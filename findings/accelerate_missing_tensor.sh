#!/usr/bin/env bash
# accelerate's load_checkpoint_in_model names tensors of the file that the model has not, and says nothing of
# tensors of the model that the file has not: these keep their random initial values. strict=False is the
# default.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'accelerate==1.15.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import logging

import accelerate
import torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import save_file
from torch import nn

records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger().addHandler(handler)


def model(seed):
    torch.manual_seed(seed)
    return nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})


print("torch", torch.__version__, "accelerate", accelerate.__version__)
saved, loaded = model(0), model(1)
tensors = saved.state_dict()
save_file({"third.weight": torch.ones(2), **tensors}, "over.safetensors", metadata={"format": "pt"})
save_file({n: t for n, t in tensors.items() if n != "second.weight"}, "short.safetensors", metadata={"format": "pt"})
load_checkpoint_in_model(model(2), "over.safetensors")
about_over = [text for text in records if "third.weight" in text]
records.clear()
load_checkpoint_in_model(loaded, "short.safetensors")
about_short = [text for text in records if "second.weight" in text]
print("expected: a word about either")
print("seen: a tensor too many:", len(about_over), "message(s); a tensor too few:", len(about_short))
assert len(about_over) == 1 and not about_short
assert torch.equal(loaded["first"].weight, saved["first"].weight)
assert torch.equal(loaded["second"].weight, model(1)["second"].weight)
PYTHON
