#!/usr/bin/env bash
# A datasets.IterableDataset that load_state_dict has put in the middle of an epoch begins there in every later
# epoch as well: the rows before are never seen again, for as long as the process lives. The epoch's number, in
# the same state, does not matter.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'datasets==5.2.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import datasets
from datasets import Dataset

datasets.disable_progress_bars()
print("datasets", datasets.__version__)


def stream():
    return Dataset.from_dict({"row": list(range(24))}).to_iterable_dataset()


stopped = stream()
rows = iter(stopped)
for _ in range(5):
    next(rows)
resumed = stream()
resumed.load_state_dict(stopped.state_dict())
lengths = []
for epoch in range(3):
    resumed.set_epoch(epoch)
    lengths.append(sum(1 for _ in resumed))
print("expected: the rest of the epoch, 19 rows, and then epochs of 24")
print("seen:", lengths)
assert lengths == [19, 19, 19]
PYTHON
