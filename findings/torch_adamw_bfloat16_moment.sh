#!/usr/bin/env bash
# AdamW with weights in bfloat16 keeps its moments in bfloat16, where a second moment times beta2 = 0.999 rounds
# back to itself: it grows, and never decays. One large gradient early on shrinks all later steps of that weight
# for good, with the fused, the foreach and the plain optimizer alike. A decay near 1 in bfloat16 is no decay,
# in an optimizer as in a recurrent state.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch

print("torch", torch.__version__)
print("expected: 5000 steps after a gradient of 1, its square has decayed to 0.999**4999 of 1e-3, 6.7e-6")
for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
    seen = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, **options)
        for step in range(5000):
            weight.grad = torch.full_like(weight, 1.0 if step == 0 else 1e-3)
            optimizer.step()
        seen[dtype] = optimizer.state[weight]["exp_avg_sq"][0].item()
    print("seen:", options, {str(dtype): f"{value:.2g}" for dtype, value in seen.items()})
    assert seen[torch.float32] < 1e-5 and seen[torch.bfloat16] > 9e-4
PYTHON
