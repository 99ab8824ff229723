#!/usr/bin/env bash
# torch.linalg.matrix_exp takes bfloat16 and float16 on a CPU and returns numbers that have nothing to do with
# the exponential: about -1e30 and -2e4 for half of the identity. In float32, one matrix has five digits and a
# batch of matrices seven. It is how a state-space model's exp(A dt) is discretised; whoever casts a layer to
# bfloat16 gets no error.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch

print("torch", torch.__version__)
half = 0.5 * torch.eye(4)
right = torch.linalg.matrix_exp(half.double())[0, 0].item()
print(f"expected: exp(0.5) = {right:.6f} on the diagonal, to the digits of each dtype")
seen = {dtype: torch.linalg.matrix_exp(half.to(dtype))[0, 0].item() for dtype in (torch.bfloat16, torch.float16)}
alone = torch.linalg.matrix_exp(half)[0, 0].item()
batch = torch.linalg.matrix_exp(half.expand(3, 4, 4))[0, 0, 0].item()
print("seen:", *(f"{dtype} {value:.4g};" for dtype, value in seen.items()))
print(f"seen: float32 {alone:.7f} alone, {batch:.7f} in a batch of three")
assert not any(abs(value - right) < 1 for value in seen.values())
assert abs(alone - right) > 1e-5 and abs(batch - right) < 1e-6
PYTHON
