#!/usr/bin/env bash
# add_weighted_adapter of one adapter with weight 1.0 gives that adapter, whatever the combination, unless it
# uses rsLoRA: the combination is scaled by alpha / r and once more by the root of the rank, so it is twice as
# strong with r = 4 and eight times with r = 64. Nothing is said.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'peft==0.21.2'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)


def delta(rank, use_rslora, combination):
    torch.manual_seed(0)
    lora = LoraConfig(target_modules=["q_proj"], r=rank, lora_alpha=16, use_rslora=use_rslora)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), lora)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    model.add_weighted_adapter(["default"], [1.0], "combined", combination_type=combination)
    return (layer.get_delta_weight("combined").norm() / layer.get_delta_weight("default").norm()).item()


print("expected: the combination is as strong as the adapter")
for rank in (4, 64):
    for combination in ("linear", "svd", "cat"):
        plain, rslora = delta(rank, False, combination), delta(rank, True, combination)
        print(f"seen: r={rank} {combination}: LoRA {plain:.3f} times, rsLoRA {rslora:.3f} times")
        assert abs(plain - 1) < 1e-2 and abs(rslora - rank**0.5) < 1e-2 * rank**0.5
PYTHON
