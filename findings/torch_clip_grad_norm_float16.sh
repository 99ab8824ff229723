#!/usr/bin/env bash
# clip_grad_norm_ keeps the norm in the dtype of the gradients: float16 gradients whose norm is beyond 65,504,
# each of them small, have the norm inf, and all of them become 0. Training stands still without an error
# (error_if_nonfinite=False is the default), where one expects gradients of norm 1.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch

print("torch", torch.__version__)
weight = torch.nn.Parameter(torch.zeros(1_000_000, dtype=torch.float16))
weight.grad = torch.full_like(weight, 100.0)
true_norm = weight.grad.double().norm().item()
norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
left = weight.grad.double().norm().item()
print(f"expected: gradients of norm {true_norm:.0f}, none above 100, are scaled to a norm of 1")
print(f"seen: norm {norm.item()}, gradients of norm {left} left")
assert norm.isinf() and left == 0
PYTHON
