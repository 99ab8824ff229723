#!/usr/bin/env bash
# ExecuTorch's remainder of integers has the sign of what is divided, as in C; torch's has that of the divisor, as in
# Python, and so has ExecuTorch's own remainder of floating-point numbers. A slot of a ring of keys, counted backwards by
# `%`, is then negative, and nothing is said.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'executorch==1.5.1' 'torch==2.13.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore venv/bin/python - 2>log <<'PYTHON' || { cat log; exit 1; }
from importlib.metadata import version

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime

print("executorch", version("executorch"), "torch", torch.__version__)


class Remainder(torch.nn.Module):
    def forward(self, x):
        return x % 5


def in_executorch(x):
    program = to_edge_transform_and_lower(torch.export.export(Remainder(), (x,))).to_executorch()
    loaded = Runtime.get().load_program(program.buffer)
    return loaded.load_method("forward").execute([x])[0].tolist()


whole = torch.tensor([-7, -1, 0, 3, 9])
print("expected:", Remainder()(whole).tolist())
print("seen:", in_executorch(whole), "of integers;", in_executorch(whole.float()), "of floating-point numbers")
assert Remainder()(whole).tolist() == [3, 4, 0, 3, 4]
assert in_executorch(whole) == [-2, -1, 0, 3, 4]
assert in_executorch(whole.float()) == [3.0, 4.0, 0.0, 3.0, 4.0]
PYTHON
