#!/usr/bin/env bash
# Autocast computes exp, softplus, softmax, cumsum, cumprod, sum, rsqrt and the norms in float32 on CUDA, and in
# bfloat16 on a CPU: the lists differ by device, and a model under autocast on a CPU sums its decays in another
# precision than the same script on a card. The tables can be read from a build for CPUs alone.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
import torch.nn.functional as F

print("torch", torch.__version__)
ops = "exp softplus softmax.int cumsum cumprod sum rsqrt layer_norm rms_norm logsumexp".split()
has = torch._C._dispatch_has_kernel_for_dispatch_key
table = {op: (has(f"aten::{op}", "AutocastCUDA"), has(f"aten::{op}", "AutocastCPU")) for op in ops}
print("expected: an op that autocast protects on one device it protects on the other")
print("seen (has a rule on CUDA, on CPUs):", table)
with torch.autocast("cpu", dtype=torch.bfloat16):
    x = F.linear(torch.ones(2, 4), torch.ones(4, 4))
    results = {"exp": x.exp(), "softplus": F.softplus(x), "cumsum": x.cumsum(0), "softmax": x.softmax(-1)}
dtypes = {name: result.dtype for name, result in results.items()}
print("seen under autocast on this CPU:", {name: str(dtype) for name, dtype in dtypes.items()})
assert set(table.values()) == {(True, False)}
assert set(dtypes.values()) == {torch.bfloat16}
PYTHON
