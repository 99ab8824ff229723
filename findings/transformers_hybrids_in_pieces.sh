#!/usr/bin/env bash
# A text that is read in pieces, each with the cache of those before it, has the same logits as at once in Llama
# and Mamba-2. In Mamba, FalconMamba, Jamba and MiniMax a piece of several tokens begins with empty states,
# whatever the cache holds, and Bamba's attention begins at position 0 again unless position_ids are given.
# Nothing is said. A second turn of a conversation, chunked prefill and verifying drafts read pieces.
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
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
MIXER = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)
KINDS = {
    "llama": {},
    "mamba2": dict(state_size=8, num_heads=8, n_groups=1, chunk_size=8),
    "mamba": dict(state_size=8),
    "falcon_mamba": dict(state_size=8),
    "jamba": dict(num_experts=2, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "minimax": dict(**EXPERTS, block_size=8, layer_types=LAYERS),
    "bamba": dict(**MIXER, attn_layer_indices=[1]),
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

seen = {}
with torch.no_grad():
    for kind, fields in KINDS.items():
        model = build(kind, **fields)
        cache, logits = None, []
        for piece in ids.split([13, 9, 8], dim=1):
            out = model(piece, use_cache=True, cache=cache)
            cache = out.cache
            logits.append(out.logits)
        seen[kind] = gap(torch.cat(logits, 1), model(ids, use_cache=False).logits)
print("expected: the logits of the whole text, or an error that says that a piece is one token")
shown = {kind: f"{value:.2g}" for kind, value in seen.items()}
print("seen (largest difference, as a share of the largest logit):", shown)
assert seen.pop("llama") < 1e-4 and seen.pop("mamba2") < 1e-4
assert all(value > 0.01 for value in seen.values())
PYTHON
