#!/usr/bin/env bash
# Trainer with a schedule-free optimizer saves the weights that it trains with, not the averaged ones that it evaluates:
# it switches to those for an evaluation, and not for a checkpoint, nor at the end of training. Whoever loads the folder
# has another model than the one whose loss was shown, and nothing says so. An evaluation just before hides it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'schedulefree==1.4.1' 'transformers==5.24.0' 'accelerate==1.15.0' 'torch==2.13.0' 'numpy==2.4.6'
cd "$folder"
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 venv/bin/python -W ignore - 2>log <<'PYTHON' || { cat log; exit 1; }
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

print("schedulefree", version("schedulefree"), "transformers", version("transformers"), "torch", torch.__version__)
torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (64, 16))]
arguments = TrainingArguments(
    "run", optim="schedule_free_adamw", lr_scheduler_type="constant", learning_rate=3e-2, max_steps=24, save_steps=24,
    use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no",
)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
trainer.save_model("last")
evaluated = trainer.evaluate()["eval_loss"]
trainer.save_model("after an evaluation")


def loss_of(saved):
    loaded = LlamaForCausalLM.from_pretrained(saved)
    return Trainer(loaded, arguments, eval_dataset=rows).evaluate()["eval_loss"]


seen = {saved: round(loss_of(saved), 4) for saved in ("run/checkpoint-24", "last", "after an evaluation")}
print("expected: every saved model has the loss that was evaluated,", round(evaluated, 4))
print("seen:", seen)
assert abs(seen["after an evaluation"] - evaluated) < 1e-3
assert min(abs(seen[saved] - evaluated) for saved in ("run/checkpoint-24", "last")) > 1e-3
PYTHON
