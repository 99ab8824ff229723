#!/usr/bin/env bash
# A row that packs documents, whose position_ids begin again with each of them as DataCollatorWithFlattening
# makes it, keeps the documents apart only where no cache is made. Forward makes one by default
# (use_cache=True), in training mode too: Trainer turns it off, a training loop of one's own does not, and there
# every document attends to those before it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
import transformers
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__)
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).train()
first, second = torch.randint(3, 64, (13,)).tolist(), torch.randint(3, 64, (17,)).tolist()
batch = DataCollatorWithFlattening()([{"input_ids": first}, {"input_ids": second}])
alone = model(torch.tensor([second])).logits[0]


def gap(**options):
    packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **options).logits[0, 13:]
    return ((packed - alone).abs().max() / alone.abs().max()).item()


seen = {"as it is": gap(), "use_cache=False": gap(use_cache=False)}
print("expected: the second document's logits as alone, whether a cache is made or not")
shown = {name: f"{value:.2g}" for name, value in seen.items()}
print("seen (largest difference, as a share of the largest logit):", shown)
assert seen["use_cache=False"] < 1e-4 < 0.1 < seen["as it is"]
PYTHON
