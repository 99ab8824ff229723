#!/usr/bin/env bash
# from_pretrained(gguf_file=...) reads the tensors and keys that it knows, and says nothing of the others. Of a
# Llama it leaves out the biases of attention (as Granite's code models have them), the scaling of rotary
# positions by llama.rope. scaling.* (linear, YaRN), and rope_freqs.weight, in which Llama 3.1 and later carry
# theirs: the model computes as if the file had none of them. llama.cpp uses all.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'gguf==0.19.0' 'accelerate==1.15.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__, "gguf 0.19.0")
WIDTH, HEADS, GROUPS, SIZE, HIDDEN, VOCABULARY = 16, 2, 1, 8, 32, 64


def write(name, tensors=(), scaling=None):
    writer = gguf.GGUFWriter(f"{name}.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(SIZE)
    writer.add_vocab_size(VOCABULARY)
    if scaling:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (VOCABULARY, WIDTH), "blk.0.attn_q": (HEADS * SIZE, WIDTH)}
    shapes |= {f"blk.0.attn_{name}": (GROUPS * SIZE, WIDTH) for name in "kv"}
    shapes |= {"blk.0.attn_output": (WIDTH, HEADS * SIZE), "blk.0.ffn_gate": (HIDDEN, WIDTH)}
    shapes |= {"blk.0.ffn_up": (HIDDEN, WIDTH), "blk.0.ffn_down": (WIDTH, HIDDEN)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.3, shape).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name, values in dict(tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ones = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE, "output": WIDTH}
write("plain")
write("biases", {f"blk.0.attn_{name}.bias": np.ones(size, np.float32) for name, size in ones.items()})
write("frequencies", {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)})
write("linear", scaling=gguf.RopeScalingType.LINEAR)
write("yarn", scaling=gguf.RopeScalingType.YARN)
ids, logits = torch.arange(5, 53)[None], {}
for name in ("plain", "biases", "frequencies", "linear", "yarn"):
    model, info = AutoModelForCausalLM.from_pretrained(".", gguf_file=f"{name}.gguf", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits[name] = model.eval()(ids).logits
print("expected: each of the four files gives other logits than the plain one, or is refused")
seen = {name: torch.equal(values, logits["plain"]) for name, values in logits.items() if name != "plain"}
print("seen (logits are those of the plain file, and nothing is reported):", seen)
assert all(seen.values())
PYTHON
