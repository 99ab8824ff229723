#!/usr/bin/env bash
# A model that accelerate's cpu_offload (or a device_map with "cpu" or "disk") has offloaded multiplies by
# numbers that are nobody's where a module reads a weight of its child (F.linear(x, self.child.weight)) instead
# of calling it: the weight is on the meta device then, and matrix products of a CPU tensor with a meta tensor
# return memory that was not written, where elementwise ops raise an error. Fused kernels and tied heads read
# weights like this.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'accelerate==1.15.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import accelerate
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(64, 64, bias=False)
        self.other = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.other(F.linear(x, self.child.weight))


print("torch", torch.__version__, "accelerate", accelerate.__version__)
torch.manual_seed(0)
model, x = Model(), torch.ones(1, 64)
wanted = model(x).detach()
offloaded = cpu_offload(model, execution_device="cpu")
print("expected: the same output, or an error that names the weight on the meta device")
seen = offloaded(x).detach()
print("seen: no error; device", seen.device, "equal", torch.equal(seen, wanted))
assert seen.device.type == "cpu" and not torch.allclose(seen, wanted)
PYTHON
