#!/usr/bin/env bash
# With label_smoothing_factor, Trainer computes the loss itself, and shifts the labels where the name of the model's class
# is that of a causal model of transformers. Named otherwise are a class registered with AutoModelForCausalLM.register,
# what PEFT's prefix tuning has inside, and a model that fully_shard (FSDP2) has turned into a class FSDP...: their logits
# are compared with the token that they just read, and the sum is divided by the number of shifted labels. Without label
# smoothing all have the right loss.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'peft==0.21.2' 'accelerate==1.15.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
from pathlib import Path

import peft
import torch
import transformers
from peft import PrefixTuningConfig, get_peft_model
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

print("transformers", transformers.__version__, "torch", torch.__version__, "peft", peft.__version__)


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


AutoConfig.register("own", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
ids = torch.randint(3, 64, (8, 20), generator=torch.Generator().manual_seed(0))


def smoothed(logits, targets, number):
    surprise = -logits.log_softmax(-1)
    right = surprise.gather(-1, targets.unsqueeze(-1)).sum()
    return ((0.9 * right + 0.1 * surprise.sum() / logits.shape[-1]) / number).item()


def losses(kind, factor):
    torch.manual_seed(0)
    config = (OwnConfig if kind == "own class" else LlamaConfig)(**sizes, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    if kind == "prefix tuning":
        model = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids)
    logits, number = output.logits, ids[:, 1:].numel()
    settings = dict(report_to="none", use_cpu=True, disable_tqdm=True, label_smoothing_factor=factor)
    trainer = Trainer(model, TrainingArguments("out", **settings))
    if kind == "fully_shard":
        model = fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        inputs = {"input_ids": ids, "labels": ids}
        seen = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(number)).item()
    if factor == 0:
        return seen, output.loss.item(), None
    return seen, smoothed(logits[:, :-1], ids[:, 1:], number), smoothed(logits, ids, number)


init_process_group("gloo", init_method=f"file://{Path.cwd()}/rendezvous", rank=0, world_size=1)
for kind in ("Llama", "own class", "prefix tuning", "fully_shard"):
    plain, wanted, _ = losses(kind, 0)
    assert abs(plain - wanted) < 1e-4, (kind, plain, wanted)
    seen, wanted, unshifted = losses(kind, 0.1)
    print(f"{kind}: expected {wanted:.4f}, seen {seen:.4f} (of labels that are not shifted: {unshifted:.4f})")
    assert abs(seen - (wanted if kind == "Llama" else unshifted)) < 1e-4 < abs(wanted - unshifted)
destroy_process_group()
PYTHON
