#!/usr/bin/env bash
# An adapter of the embeddings of a model with a tied head, made with PEFT's own switch for that
# (LoraConfig(ensure_weight_tying=True)), is right as an adapter: embeddings and head share it. Merged, its update is
# added to the shared weight twice, once for each of them. PEFT warns of "complications" in general.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'peft==0.21.2' 'accelerate==1.15.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
ids, seen = torch.arange(3, 43).view(2, 20), {}
for tied, options in ((True, {"ensure_weight_tying": True}), (False, {})):
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
    first = base.get_input_embeddings().weight.detach().clone()
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=["embed_tokens"], init_lora_weights=False, **options)
    model = get_peft_model(base, lora).eval()
    layer = model.get_input_embeddings()
    update = (layer.lora_embedding_B["default"] @ layer.lora_embedding_A["default"]).T.detach()
    with torch.no_grad():
        wanted = model(ids).logits
        merged = model.merge_and_unload().eval()
        moved = merged.get_input_embeddings().weight - first
        times = ((moved * update).sum() / update.square().sum()).item()
        seen[tied] = times, torch.allclose(merged(ids).logits, wanted, atol=1e-3)
print("expected: the merged model has the update once, and gives the adapter's logits")
for tied, (times, same) in seen.items():
    print(f"seen: head {'tied' if tied else 'of its own'}: update added {times:.3f} times, same logits: {same}")
assert seen[False][1] and abs(seen[False][0] - 1) < 1e-3
assert not seen[True][1] and abs(seen[True][0] - 2) < 1e-3
PYTHON
