#!/usr/bin/env bash
# logcumsumexp, with which scans are computed in log space, has NaN in its gradient where a row begins with
# -inf, the log of an empty state or of a gate that is shut; its values are right, and logsumexp of the same row
# has the right gradient.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch

print("torch", torch.__version__)
gradients = {}
for function in (torch.logsumexp, torch.logcumsumexp):
    x = torch.tensor([float("-inf"), 0.0, 1.0], requires_grad=True)
    last = function(x, 0) if function is torch.logsumexp else function(x, 0)[-1]
    last.backward()
    gradients[function.__name__] = x.grad.tolist()
    print("values agree:", function.__name__, round(last.item(), 6))
print("expected: the gradient of the last sum is softmax(x), 0 for the entry of weight 0, from both")
print("seen:", gradients)
wanted = torch.tensor([float("-inf"), 0.0, 1.0]).softmax(0)
torch.testing.assert_close(torch.tensor(gradients["logsumexp"]), wanted)
first, *others = gradients["logcumsumexp"]
assert first != first
torch.testing.assert_close(torch.tensor(others), wanted[1:])
PYTHON
