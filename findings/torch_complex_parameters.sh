#!/usr/bin/env bash
# module.double() and module.to(torch.float64) are the same for real parameters. Complex ones, as S4D and S5
# have them, stay complex64 under double() (so a check in float64 is none), and lose their imaginary part under
# to(torch.float64) or to(torch.bfloat16), with a warning that comes once a process.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
from torch import nn


class Diagonal(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([-0.5 + 3j]))
        self.b = nn.Parameter(torch.ones(1))


print("torch", torch.__version__)
ways = {
    "double()": lambda module: module.double(),
    "to(float64)": lambda module: module.to(torch.float64),
    "bfloat16()": lambda module: module.bfloat16(),
    "to(bfloat16)": lambda module: module.to(torch.bfloat16),
}
seen = {name: (module.a.dtype, module.b.dtype) for name, way in ways.items() if (module := way(Diagonal()))}
print("expected: double() and to(float64) agree, and make a complex128 of a complex64")
print("seen (complex parameter, real one):", {name: tuple(map(str, dtypes)) for name, dtypes in seen.items()})
assert seen["double()"] == (torch.complex64, torch.float64)
assert seen["to(float64)"] == (torch.float64, torch.float64)
assert seen["bfloat16()"] == (torch.complex64, torch.bfloat16)
assert seen["to(bfloat16)"] == (torch.bfloat16, torch.bfloat16)
PYTHON
