#!/usr/bin/env bash
# GrokAdamW (optim="grokadamw" of Trainer) keeps its moments in its parameter groups, under the parameters themselves. They
# are saved, and load_state_dict brings them back under copies of the parameters, which are not those of the model: the
# next step begins with empty moments, and with a bias correction of step 1. A run that is resumed goes another way.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'accelerate==1.15.0' 'grokadamw==0.1.2'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

print(*(f"{name} {version(name)}" for name in ("grokadamw", "transformers", "torch")))
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
ids = torch.randint(3, 64, (64, 20), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in ids]


def train(optimizer, resumed):
    torch.manual_seed(0)
    settings = dict(report_to="none", use_cpu=True, disable_tqdm=True, save_steps=4, max_steps=8, learning_rate=1e-3)
    settings |= dict(optim=optimizer, per_device_train_batch_size=8, lr_scheduler_type="constant", seed=0)
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), TrainingArguments(optimizer, **settings), train_dataset=rows)
    trainer.train(resume_from_checkpoint=f"{optimizer}/checkpoint-4" if resumed else None)
    held = [group["state"].values() for group in trainer.optimizer.param_groups if "state" in group]
    steps = {state["step"] for states in held for state in states}
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]), steps


seen = {}
for optimizer in ("adamw_torch", "grokadamw"):
    whole, _ = train(optimizer, False)
    resumed, steps = train(optimizer, True)
    seen[optimizer] = (whole - resumed).abs().max().item()
    print(f"{optimizer}: expected 0, the resumed run's weights differ by {seen[optimizer]:.2e}", steps or "")
print("seen: moments of 4 steps beside those loaded, for the same 8 steps")
assert seen["adamw_torch"] == 0 and seen["grokadamw"] > 1e-4 and 4 in steps
PYTHON
