#!/usr/bin/env bash
# Recurrent layers made from a configuration of Qwen3-Next, Qwen3.5, Bamba, Falcon-H1 or Granite 4 start with steps of
# 1.3: their states lose a token within a few others. Those of Mamba-2, Nemotron-H and OLMo Hybrid start with steps of
# 0.001 to 0.1, as the official codes of Mamba-2 and of the gated delta net do, and keep it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

print("torch", torch.__version__, "transformers", transformers.__version__)
SIZES = dict(vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, pad_token_id=0)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=4)
DELTA = dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=16, linear_num_value_heads=32)
DELTA |= dict(linear_key_head_dim=16, linear_value_head_dim=16)
MAMBA = dict(mamba_n_heads=32, mamba_d_head=8)
MODELS = {
    "mamba2": dict(num_heads=32, head_dim=8, state_size=16),
    "nemotron_h": dict(layers_block_type=["mamba", "attention"], mamba_num_heads=32, mamba_head_dim=8, ssm_state_size=16),
    "olmo_hybrid": DELTA,
    "qwen3_next": DELTA | dict(num_experts=0, mlp_only_layers=[0, 1]),
    "qwen3_5_text": DELTA,
    "bamba": MAMBA | dict(attn_layer_indices=[1]),
    "falcon_h1": MAMBA | dict(mamba_d_ssm=256),
    "granitemoehybrid": MAMBA | dict(layer_types=["mamba", "attention"]),
}
KEPT = ("mamba2", "nemotron_h", "olmo_hybrid")
texts = torch.randint(3, 64, (1, 64), generator=torch.Generator().manual_seed(0)).repeat(2, 1)
texts[0, 0], texts[1, 0] = 1, 2  # two texts of 64 tokens that differ in the first one
print("expected: the state of every new layer tells which was the first of 64 tokens")
for name, fields in MODELS.items():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if name != "nemotron_h" or key != "num_hidden_layers"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes | fields)).eval()
    values = dict(model.named_parameters())
    bias = next(name for name in values if name.endswith("dt_bias"))
    step, rate = F.softplus(values[bias]), values[bias.replace("dt_bias", "A_log")].exp()
    half = (-step * rate).exp().median().item()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(texts, cache=cache, use_cache=True)
    state = cache.layers[0].recurrent_states[0]
    differs = ((state[0] - state[1]).norm() / state.norm()).item()
    print(f"seen: {name:17} steps {step.min():.3f} to {step.max():.3f}; the median head keeps {half:.1e} of its state "
          f"from one token to the next; after 63 more tokens the states differ by {differs:.0e}")
    assert (differs > 5e-4 and half > 0.5) if name in KEPT else (differs < 1e-5 and half < 1e-3), name
PYTHON
