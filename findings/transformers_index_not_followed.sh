#!/usr/bin/env bash
# model.safetensors.index.json says in which file each tensor lies. transformers and accelerate only take the names of
# files from it, and read all that those hold: where a tensor was written anew to one more file, and the index points
# there, the old value that still lies in its shard wins if that file comes later in the alphabet.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'accelerate==1.15.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

import accelerate
import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__, "accelerate", accelerate.__version__)
NAME = "model.layers.0.mlp.up_proj.weight"
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model, edited, seen = LlamaForCausalLM(LlamaConfig(**sizes)), torch.full((64, 32), 7.0), {}
print(f"expected: the index places {NAME} in the file with its edited values, and those are loaded")
for file in ("edited.safetensors", "zz-edited.safetensors"):
    folder = Path(file).with_suffix("")
    model.save_pretrained(folder, max_shard_size="20KB")
    save_file({NAME: edited}, folder / file, {"format": "pt"})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NAME] = file
    path.write_text(json.dumps(index))
    found, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    other = LlamaForCausalLM(model.config)
    accelerate.load_checkpoint_in_model(other, str(folder))
    seen[file] = [torch.equal(each.get_parameter(NAME).data, edited) for each in (found, other)]
    print(f"seen: in {file} the edited values are loaded by transformers: {seen[file][0]}, accelerate: {seen[file][1]}")
assert seen == {"edited.safetensors": [False, False], "zz-edited.safetensors": [True, True]}
PYTHON
