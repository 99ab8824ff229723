#!/usr/bin/env bash
# torch.compile answers `2 in (1, x.shape[0])` with no where the size is 2, as soon as it has made the size a symbol,
# which it does of itself from the second size on. The program takes the other branch, gives other numbers and says
# nothing; `n == x.shape[0]` and a size before a tuple of numbers are right. torch 2.14.1 and 2.15.0 answer rightly.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore venv/bin/python - <<'PYTHON'
import torch

print("torch", torch.__version__)


def in_tuple(x):
    return x + 1 if 2 in (1, x.shape[0]) else x - 1


def by_comparison(x):
    return x + 1 if 2 == 1 or 2 == x.shape[0] else x - 1


def answers(function, sizes):
    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager")
    return [compiled(torch.zeros(size))[0].item() for size in sizes]


alone, later = answers(in_tuple, [2]), answers(in_tuple, [5, 4, 2])
print("expected: 1.0 for two rows, whatever was computed before")
print("seen:", alone[-1], "alone;", later[-1], "after five and four rows")
print("seen, by a comparison:", answers(by_comparison, [5, 4, 2])[-1])
assert alone == [1.0] and later == [-1.0, -1.0, -1.0]
assert answers(by_comparison, [5, 4, 2]) == [-1.0, -1.0, 1.0]
PYTHON
