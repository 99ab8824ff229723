#!/usr/bin/env bash
# crop() of a hybrid's cache says "Call `activate_past_recording` before `crop` to be able to rollback the cache".
# After that call it takes the states of convolutions and the keys back, but not the recurrent states: they keep the
# tokens that were taken back, and nothing is said. Checking drafts and editing a conversation take tokens back.
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
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=None)
MIXER = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)
DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
DELTA |= dict(layer_types=["linear_attention", "full_attention"])
KINDS = {"llama": {}, "bamba": {**MIXER, "attn_layer_indices": [1]}, "olmo_hybrid": DELTA, "qwen3_5_text": DELTA}
ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))
print("expected: 15 tokens read, 3 taken back, and the next 8 read: their logits are those of the whole text")
seen = {}
for kind, fields in KINDS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from the small initial values, with which layers hardly matter
            if parameter.dim() == 2:
                parameter.normal_(std=0.5)
        wanted = model(ids, use_cache=False).logits[:, 12:]
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        for piece in (ids[:, :9], ids[:, 9:15]):
            model(piece, cache=cache, use_cache=True)
        before = [layer.recurrent_states[0].clone() for layer in cache.layers if hasattr(layer, "recurrent_states")]
        cache.crop(-3)
        after = [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]
        kept = all(torch.equal(*pair) for pair in zip(before, after))
        found = model(ids[:, 12:], cache=cache, use_cache=True, position_ids=torch.arange(12, 20).expand(2, -1)).logits
    seen[kind] = ((found - wanted).abs().max() / wanted.abs().max()).item()
    told = f"{len(before)} recurrent states, as before crop: {kept}" if before else "no recurrent state"
    print(f"seen: {kind}: {told}; difference of {seen[kind]:.1e} of the largest logit")
    assert kept
assert seen.pop("llama") < 1e-5 and min(seen.values()) > 1e-3, seen
PYTHON
