#!/usr/bin/env bash
# A model returns no hidden states and no attention weights, in silence, where its class was never built: transformers notes
# what a class can return by its name, when one of it is built. So a model that was saved whole (torch.save) or sent to a new
# process has none there, and neither has a base model that FSDP2 wraps, which makes a class of another name.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'numpy==2.4.6'
cd "$folder"
cat > build.py <<'PYTHON'
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
config = LlamaConfig(**sizes, attn_implementation="eager")
asked = dict(input_ids=torch.arange(8)[None], output_hidden_states=True, output_attentions=True)


def returned(model):
    output = model(**asked)
    return [None if states is None else len(states) for states in (output.hidden_states, output.attentions)]


print("torch", torch.__version__, "transformers", transformers.__version__)
torch.save(LlamaForCausalLM(config), "whole.pt")
print("expected: 3 hidden states, 2 matrices of attention; seen where the model was built:", returned(LlamaForCausalLM(config)))
assert returned(LlamaForCausalLM(config)) == returned(LlamaModel(config)) == [3, 2]

torch.distributed.init_process_group("gloo", init_method="file:///" + __file__.strip("/") + ".meeting", rank=0, world_size=1)
mesh = torch.distributed.init_device_mesh("cpu", (1,))
seen = returned(fully_shard(LlamaModel(config), mesh=mesh))
print("seen of a base model that fully_shard wraps:", seen)
assert seen == [None, None]
torch.distributed.destroy_process_group()
PYTHON
cat > load.py <<'PYTHON'
import torch

model = torch.load("whole.pt", weights_only=False)
output = model(torch.arange(8)[None], output_hidden_states=True, output_attentions=True)
print("seen of the same model, loaded in another process:", [output.hidden_states, output.attentions])
assert output.hidden_states is None and output.attentions is None and output.logits.shape == (1, 8, 64)
PYTHON
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
venv/bin/python "$folder/build.py" && venv/bin/python load.py
