#!/usr/bin/env bash
# An attention function that is registered with AttentionInterface.register gets attention_mask=None, unless a
# mask function is registered under the same name with AttentionMaskInterface: padding, sliding windows and
# packed documents are gone, and no warning says so. A function that does nothing but call the sdpa one is wrong
# by 10 % and more.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, MistralConfig, MistralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

masks = []


def own(module, query, key, value, attention_mask, **options):
    masks.append(attention_mask)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


print("torch", torch.__version__, "transformers", transformers.__version__)
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
sizes |= dict(num_key_value_heads=2, sliding_window=4, initializer_range=0.3)
model = MistralForCausalLM(MistralConfig(**sizes)).eval()
ids, mask = torch.randint(3, 64, (2, 24)), torch.ones(2, 24, dtype=torch.long)
mask[0, :9] = 0


def logits(name):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[mask.bool()]


AttentionInterface.register("own", own)
wanted = logits("sdpa")
without = logits("own")
given = {None if mask is None else "a mask" for mask in masks}
AttentionMaskInterface.register("own", sdpa_mask)
with_mask = logits("own")
scale = wanted.abs().max()
print("expected: the logits of sdpa, which the function calls, or an error")
print(f"seen: attention_mask {given}, off by {((without - wanted).abs().max() / scale):.2g} of the largest logit;",
      f"with a mask function {((with_mask - wanted).abs().max() / scale):.2g}")
assert given == {None} and (without - wanted).abs().max() > 0.1 * scale
assert torch.allclose(with_mask, wanted)
PYTHON
