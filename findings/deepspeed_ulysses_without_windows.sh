#!/usr/bin/env bash
# DeepSpeed's sequence parallelism for transformers (Ulysses, SDPA) trains a model with a sliding window as if it had none,
# in silence: it gathers whole rows for each head, and drops the mask that holds the window. accelerate refuses such models
# under context parallelism, and refuses models with linear attention under this one, but not these (1.15.0, read).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'deepspeed==0.19.8' 'numpy==2.4.6'
cd "$folder"
cat > two_shards.py <<'PYTHON'
import deepspeed
import torch
import transformers
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

LENGTH, WINDOW = 16, 4


def logits(model, ids, places):
    with torch.no_grad():
        return model(ids[:, places], position_ids=torch.arange(LENGTH)[None, places]).logits


def largest(x):
    x = x.abs().max()
    torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX)
    return x.item()


deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
config = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=WINDOW, attn_implementation="sdpa")
windowed = transformers.AutoModelForCausalLM.from_config(config).double()
config = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=None, attn_implementation="sdpa")
whole = transformers.AutoModelForCausalLM.from_config(config).double()
whole.load_state_dict(windowed.state_dict())
ids = torch.randint(0, 64, (1, LENGTH))
with_window, without = (logits(model, ids, slice(None)) for model in (windowed, whole))

UlyssesSPAttentionHF.register_with_transformers(
    windowed, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1, seq_length=LENGTH,
    seq_length_is_variable=False,
)
mine = slice(rank * LENGTH // 2, (rank + 1) * LENGTH // 2)
found = {name: logits(model, ids, mine) for name, model in (("no window", whole), ("a window of 4", windowed))}
off = {
    "no window": largest(found["no window"] - without[:, mine]),
    "a window of 4": largest(found["a window of 4"] - with_window[:, mine]),
    "a window of 4, and one process without it": largest(found["a window of 4"] - without[:, mine]),
}
if rank == 0:
    print("torch", torch.__version__, "transformers", transformers.__version__, "deepspeed", deepspeed.__version__)
    print("expected: two processes with half a row each give the logits of one, or the model is refused")
    for name, what in off.items():
        print(f"seen, {name}: {what:.1e} off")
assert off["no window"] < 1e-12 and off["a window of 4, and one process without it"] < 1e-12 < 0.01 < off["a window of 4"]
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore TORCH_EXTENSIONS_DIR="$folder/extensions"
venv/bin/python -m torch.distributed.run --nproc-per-node 2 two_shards.py 2> log || { cat log; exit 1; }
