#!/usr/bin/env bash
# Runs of Trainer with GaLore and APOLLO cannot be continued. Layerwise ones (optim="galore_adamw_layerwise",
# "apollo_adamw_layerwise") step in hooks, each parameter with an optimizer of its own, and the checkpoint holds the state
# of a placeholder: what is resumed begins with empty moments, without a word. Without "layerwise" Trainer refuses the
# checkpoint that it wrote, because the optimizer's projectors are objects which torch.load(weights_only=True) does not
# take.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'accelerate==1.15.0' \
    'galore-torch==1.0' 'apollo-torch==1.0.3' 'bitsandbytes==0.50.2'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - 2> log <<'PYTHON' || { tail log; exit 1; }
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

print(*(f"{name} {version(name)}" for name in ("transformers", "torch", "galore-torch", "apollo-torch")))
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
ids = torch.randint(3, 64, (64, 20), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in ids]
LOW_RANK = dict(optim_target_modules=["q_proj", "v_proj", "up_proj"], optim_args="rank=4")


def train(optimizer, resumed):
    torch.manual_seed(0)
    settings = dict(report_to="none", use_cpu=True, disable_tqdm=True, save_steps=4, max_steps=8, learning_rate=1e-3)
    settings |= dict(optim=optimizer, per_device_train_batch_size=8, lr_scheduler_type="constant", seed=0)
    settings |= {} if optimizer == "adamw_torch" else LOW_RANK
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), TrainingArguments(optimizer, **settings), train_dataset=rows)
    trainer.train(resume_from_checkpoint=f"{optimizer}/checkpoint-4" if resumed else None)
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


seen = {}
for optimizer in ("adamw_torch", "galore_adamw_layerwise", "apollo_adamw_layerwise", "galore_adamw", "apollo_adamw"):
    whole = train(optimizer, False)
    try:
        seen[optimizer] = (whole - train(optimizer, True)).abs().max().item()
        text = f"weights differ by {seen[optimizer]:.2e}"
    except Exception as error:
        seen[optimizer] = text = f"{type(error).__name__}: {str(error)[:24]}"
    held = torch.load(f"{optimizer}/checkpoint-4/optimizer.pt", weights_only=False)["state"]
    print(f"{optimizer}: expected a difference of 0, seen: {text}; states in the checkpoint: {len(held)}", flush=True)
assert seen["adamw_torch"] == 0
assert all(seen[f"{name}_adamw_layerwise"] > 1e-4 for name in ("galore", "apollo"))
assert all("Unpickling" in str(seen[f"{name}_adamw"]) for name in ("galore", "apollo"))
PYTHON
