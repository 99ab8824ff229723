#!/usr/bin/env bash
# OpenVINO takes a program of torch.export that writes to a buffer, and leaves the writing out: the model that it makes
# begins every call with the buffer's first value. The exported program itself keeps its state. Neither the conversion
# nor the first call says so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'openvino==2026.4.1' 'torch==2.13.0' 'numpy==2.4.6' packaging
cd "$folder"
OMP_NUM_THREADS=1 venv/bin/python -W ignore - <<'PYTHON'
import openvino
import torch

print("openvino", openvino.__version__, "torch", torch.__version__)


class Total(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total.add_(x)
        return self.total * 1.0


one = torch.ones(3)
program = torch.export.export(Total(), (one,))
compiled = openvino.compile_model(openvino.convert_model(program), "CPU")
seen = [float(compiled([one.numpy()])[0][0]) for _ in range(3)]
module = program.module()
expected = [module(one)[0].item() for _ in range(3)]
print("expected, and what the exported program gives:", expected)
print("seen:", seen)
assert expected == [1.0, 2.0, 3.0] and seen == [1.0, 1.0, 1.0]
PYTHON
