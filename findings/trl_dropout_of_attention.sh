#!/usr/bin/env bash
# DPO turns dropout off (disable_dropout=True, its default) in modules of torch alone: the dropout of attention of a
# Llama (0 by default), which transformers keeps as a number, goes on, so that the model differs from its own reference.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'trl==1.16.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import math

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

print("torch", torch.__version__, "transformers", transformers.__version__, "trl", trl.__version__)
words = Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
words.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
rows = {"prompt": ["w2 w3 w4 w5", "w6 w7"], "chosen": [" w8 w9", " w10 w11"], "rejected": [" w12", " w13 w14 w15"]}
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, bos_token_id=1, eos_token_id=1)
MODELS = {
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "llama": {"attention_dropout": 0.5, "intermediate_size": 64},
    "qwen3": {"attention_dropout": 0.5, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16},
}
QUIET = dict(max_steps=1, logging_steps=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no")
print("expected: the loss of the first step is log 2 =", round(math.log(2), 4), "since a model is its own reference")
seen = {}
for name, fields in MODELS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, pad_token_id=0, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(name)
    arguments = trl.DPOConfig(name + "-dpo", **QUIET, disable_tqdm=True, per_device_train_batch_size=2)
    assert arguments.disable_dropout
    model = AutoModelForCausalLM.from_pretrained(name)
    trainer = trl.DPOTrainer(model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer)
    trainer.train()
    seen[name] = trainer.state.log_history[0]["loss"]
    print("seen:", name, "has a loss of", seen[name])
assert abs(seen["gpt2"] - math.log(2)) < 1e-4, seen
assert all(abs(seen[name] - math.log(2)) > 1e-3 for name in ("llama", "qwen3")), seen
PYTHON
