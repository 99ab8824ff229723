#!/usr/bin/env bash
# PeftModel.from_pretrained loads an adapter that was trained on four layers into a model that has two of them,
# and says nothing of what it leaves out; the other way round it warns. So an adapter of a teacher goes onto a
# student that has fewer layers or other attention, and only a part of it is there.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'peft==0.21.2'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def model(layers):
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers))


print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
said = {}
for trained, used in ((4, 2), (2, 4)):
    get_peft_model(model(trained), LoraConfig(target_modules=["q_proj", "v_proj"])).save_pretrained(f"of-{trained}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PeftModel.from_pretrained(model(used), f"of-{trained}")
    said[trained, used] = [str(each.message) for each in caught if "keys" in str(each.message)]
print("expected: a word about the layers that the model lacks, as about those that the adapter lacks")
print("seen: adapter of 4 layers in 2:", len(said[4, 2]), "warnings; of 2 layers in 4:", len(said[2, 4]))
assert not said[4, 2] and len(said[2, 4]) == 1
PYTHON
