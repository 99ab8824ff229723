#!/usr/bin/env bash
# A row of packed documents (position_ids begin again, no attention_mask, no cache) keeps them apart in Llama.
# In every hybrid tried here, and in gpt-oss, whose layers are attention alone, a document reads those before
# it: neither the recurrent states nor gpt-oss's masks look at positions that begin again. Nothing is said.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=None)
MIXER = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
LINEAR |= dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
KINDS = {
    "llama": {},
    "gpt_oss": dict(num_local_experts=1, num_experts_per_tok=1),
    "mamba2": dict(state_size=8, num_heads=8, n_groups=1, chunk_size=8),
    "bamba": dict(**MIXER, attn_layer_indices=[1]),
    "granitemoehybrid": dict(
        **MIXER, layer_types=["mamba", "attention", "mamba"], num_local_experts=2, num_experts_per_tok=1,
        shared_intermediate_size=32,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"]),
    "olmo_hybrid": LINEAR,
}


def build(kind, **fields):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | fields)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # away from the small initial values, with which layers hardly matter
        if parameter.dim() == 2:
            parameter.data = 0.15 * torch.randn(parameter.shape, generator=generator)
    return model


def gap(got, wanted):
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


print("torch", torch.__version__, "transformers", transformers.__version__)
ids = torch.randint(3, 64, (2, 30), generator=torch.Generator().manual_seed(5))

positions = torch.cat([torch.arange(13), torch.arange(17)])[None]
seen = {}
with torch.no_grad():
    for kind, fields in KINDS.items():
        model = build(kind, **fields)
        packed = model(ids[:1], position_ids=positions, use_cache=False).logits[:, 13:]
        seen[kind] = gap(packed, model(ids[:1, 13:], use_cache=False).logits)
print("expected: the second document's logits as alone, or an error that says that packed rows are not read")
shown = {kind: f"{value:.2g}" for kind, value in seen.items()}
print("seen (largest difference, as a share of the largest logit):", shown)
assert seen.pop("llama") < 1e-4
assert all(value > 0.05 for value in seen.values())
PYTHON
