#!/usr/bin/env bash
# torch.compile raises an internal error on a subclass of nn.LSTM whose forward calls super().forward (of nn.GRU and nn.RNN
# too, by hand). torch 2.15 compiles it where the parent is called by its name, or where nothing is overridden; 2.13 and
# 2.14.1 compile it in each form (by hand).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.15.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore venv/bin/python - <<'PYTHON'
import torch
from torch import nn

print("torch", torch.__version__)


class BySuper(nn.LSTM):
    def forward(self, x, states=None):
        return super().forward(x, states)


class ByName(nn.LSTM):
    def forward(self, x, states=None):
        return nn.LSTM.forward(self, x, states)


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent, self.head = kind(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


def compiled(kind):
    torch.compiler.reset()
    model, x = Tagger(kind), torch.ones(1, 3, 4)
    try:
        return str(torch.equal(torch.compile(model, backend="eager")(x), model(x)))
    except torch._dynamo.exc.InternalTorchDynamoError as error:
        return str(error).splitlines()[0]


print("expected: True, a compiled model gives what it gives uncompiled")
seen = {kind.__name__: compiled(kind) for kind in (nn.LSTM, ByName, BySuper)}
for name, what in seen.items():
    print(f"seen, {name}: {what}")
assert seen["LSTM"] == seen["ByName"] == "True" and "has no type" in seen["BySuper"]
PYTHON
