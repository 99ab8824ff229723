#!/usr/bin/env bash
# Nemotron-H reads a prompt with steps of at least config.time_step_min (0.001), and decodes with steps as they come
# out of softplus: a head that learnt smaller ones writes and forgets faster in a prompt than token by token.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

print("torch", torch.__version__, "transformers", transformers.__version__)
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(layers_block_type=["mamba", "attention", "mlp"], mamba_num_heads=8, mamba_head_dim=8, head_dim=8)
SIZES |= dict(ssm_state_size=8, n_groups=1, chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=None)
ids = torch.randint(3, 64, (2, 60), generator=torch.Generator().manual_seed(0))
print("expected: token by token, in float64, the states and logits of the whole text at once")
seen = {}
for least in (0.001, 1e-9):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron_h", **SIZES, time_step_min=least)).eval()
    model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
            elif name.endswith("dt_bias"):
                parameter.fill_(-9.0)  # steps of some 0.0001
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        whole = model(ids, cache=caches[0], use_cache=True).logits
        steps = [model(token, cache=caches[1], use_cache=True).logits for token in ids.split(1, dim=1)]
    states = [cache.layers[0].recurrent_states[0] for cache in caches]
    size = [state.norm().item() for state in states]
    seen[least] = size[0] / size[1]
    logits = ((torch.cat(steps, 1) - whole).abs().max() / whole.abs().max()).item()
    print(f"seen: time_step_min={least}: state read at once {seen[least]:.4f} times as large, logits off by {logits:.1e}")
assert seen[0.001] > 2 and abs(seen[1e-9] - 1) < 1e-4, seen
PYTHON
