#!/usr/bin/env bash
# A padded row in a batch has the logits that it has alone in Mamba, Jamba and Bamba, which mask padding before
# their convolution and their scan. In RecurrentGemma, RWKV and xLSTM the padding on the left is read into the
# recurrent states, attention_mask or not, so that a prompt's answer depends on the longest prompt beside it.
# Nothing is said.
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
KINDS = {
    "mamba": dict(state_size=8),
    "bamba": dict(**MIXER, attn_layer_indices=[1]),
    "recurrent_gemma": dict(
        lru_width=32, attention_window_size=8, block_types=["recurrent", "recurrent", "attention"]
    ),
    "rwkv": dict(attention_hidden_size=32),
    "xlstm": dict(num_heads=4, embedding_dim=32, num_blocks=2, chunk_size=8),
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
mask = torch.ones(2, 30, dtype=torch.long)
mask[0, :9] = 0
with torch.no_grad():
    for kind, fields in KINDS.items():
        model = build(kind, **fields)
        padded = model(ids.masked_fill(mask == 0, 0), attention_mask=mask, use_cache=False).logits[:1, 9:]
        seen[kind] = gap(padded, model(ids[:1, 9:], use_cache=False).logits)
print("expected: the logits of the row alone, or an error that says that the mask is not read")
shown = {kind: f"{value:.2g}" for kind, value in seen.items()}
print("seen (largest difference, as a share of the largest logit):", shown)
assert seen.pop("mamba") < 1e-4 and seen.pop("bamba") < 1e-4
assert all(value > 0.01 for value in seen.values())
PYTHON
