#!/usr/bin/env bash
# In bfloat16 on a CPU, adding many small numbers into one place stops at 256 for index_add_, index_put_ and the
# gradients of x[index], nn.Embedding and LayerNorm's bias, while scatter_add_, sum() and the gradients of
# index_select and gather go on. So the embedding of a token that a batch holds 5,000 times gets a twentieth of
# its gradient, and two spellings of one selection train differently.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
from torch import nn

print("torch", torch.__version__)
n, ones, zeros = 5000, torch.ones(5000, dtype=torch.bfloat16), torch.zeros(5000, dtype=torch.long)


def gradient(select):
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    select(x).sum().backward()
    return x.grad[0, 0].item()


def of_module(module, inputs, parameter):
    module(inputs).sum().backward()
    return parameter(module).grad.flatten()[0].item()


stops = {
    "index_add_": torch.zeros(1, dtype=torch.bfloat16).index_add_(0, zeros, ones).item(),
    "index_put_": torch.zeros(1, dtype=torch.bfloat16).index_put_((zeros,), ones, accumulate=True).item(),
    "gradient of x[index]": gradient(lambda x: x[zeros]),
    "gradient of nn.Embedding": of_module(nn.Embedding(2, 3, dtype=torch.bfloat16), zeros, lambda m: m.weight),
    "gradient of LayerNorm's bias": of_module(
        nn.LayerNorm(3, dtype=torch.bfloat16), ones[:, None].repeat(1, 3), lambda m: m.bias
    ),
}
goes_on = {
    "sum": ones.sum().item(),
    "scatter_add_": torch.zeros(1, dtype=torch.bfloat16).scatter_add_(0, zeros, ones).item(),
    "gradient of index_select": gradient(lambda x: x.index_select(0, zeros)),
    "gradient of gather": gradient(lambda x: x.gather(0, zeros[:, None].repeat(1, 3))),
}
print(f"expected: {n} ones are {n}, or 4992, the bfloat16 beside it, in all of them")
print("seen:", stops | goes_on)
assert set(stops.values()) == {256.0}
assert set(goes_on.values()) == {4992.0}
PYTHON
