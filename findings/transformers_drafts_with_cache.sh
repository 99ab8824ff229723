#!/usr/bin/env bash
# Assisted generation from a cache that holds the beginning of a text reads the whole text after it: what is in the cache
# counts twice, and another text comes out than without drafts.
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
torch.manual_seed(0)
SIZES = dict(vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4)
config = AutoConfig.for_model("llama", **SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None)
model = AutoModelForCausalLM.from_config(config).eval().double()
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.25)
DRAFTS = {"none": {}, "looked up in the prompt": {"prompt_lookup_num_tokens": 3}, "an assistant's": {"assistant_model": model}}
OPTIONS = dict(max_new_tokens=24, do_sample=False)
print("expected: greedy text of 24 tokens does not depend on drafts, nor on a cache of the first 20 of 24 given tokens")
seen = {}
for name, options in DRAFTS.items():
    for cached in (0, 20):
        same, lengths = 0, set()
        for seed in range(10):
            ids = torch.randint(3, 32, (1, 24), generator=torch.Generator().manual_seed(seed))
            cache = DynamicCache(config=config)
            if cached:
                with torch.no_grad():
                    model(ids[:, :cached], cache=cache, use_cache=True)
            found = model.generate(ids, cache=cache, **options, **OPTIONS)
            same += torch.equal(found, model.generate(ids, **OPTIONS))
            lengths.add(cache.get_seq_length())
        print(f"seen: drafts {name}, {cached} tokens in the cache: {same} of 10 texts are the same; 47 tokens were "
              f"read, and the cache counts {', '.join(map(str, sorted(lengths)))}")
        seen[name, cached] = same
assert seen.pop(("looked up in the prompt", 20)) <= 2 and seen.pop(("an assistant's", 20)) <= 2, seen
assert set(seen.values()) == {10}, seen
PYTHON
