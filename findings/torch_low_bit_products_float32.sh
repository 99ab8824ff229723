#!/usr/bin/env bash
# torch's products of a row with a weight of 8 or of 4 bits on a CPU read the same weight whatever the row's dtype, yet
# with a row of float32 or float16 they take tens of times as long as with one of bfloat16, and longer than the product
# with the whole weight in float32. A float32 model that is rounded decodes slower than before. Seen with AVX2 and
# AVX-512; on other processors of the family bfloat16 is as slow.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore venv/bin/python - <<'PYTHON'
import statistics
import time

import torch

print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
rows, columns, group = 6144, 1024, 32
codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
nibbles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(16, (rows, columns)).int(), 1)
weight = torch.randn(rows, columns)


def milliseconds(run):
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return 1000 * statistics.median(seconds)


found = {"float32 weight": milliseconds(lambda: torch.nn.functional.linear(torch.ones(1, columns), weight))}
for dtype in (torch.bfloat16, torch.float32, torch.float16):
    row, scales = torch.ones(1, columns, dtype=dtype), torch.ones(rows, dtype=dtype)
    pairs = torch.ones(columns // group, rows, 2, dtype=dtype)
    found["8 bits", dtype] = milliseconds(lambda: torch.ops.aten._weight_int8pack_mm(row, codes, scales))
    found["4 bits", dtype] = milliseconds(
        lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(row, nibbles, group, pairs)
    )
print("expected: a quarter and an eighth of the bytes of float32, so less time, in every dtype of the row")
for name, value in found.items():
    print("seen:", name if isinstance(name, str) else f"{name[0]}, row of {name[1]}", f"{value:.2f} ms")
for bits in ("8 bits", "4 bits"):
    for dtype in (torch.float32, torch.float16):
        assert found[bits, dtype] > 3 * found[bits, torch.bfloat16]
        assert found[bits, dtype] > found["float32 weight"]
PYTHON
