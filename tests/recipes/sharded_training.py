"""Trains a tiny model of every family, sharded by torch's FSDP2 where there are several processes.

python -m torch.distributed.run --nproc_per_node 2 sharded_training.py OUTPUT.pt
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.training.optim import parameter_groups

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2}
FAMILIES = {
    "longhorn": {"state_size": 4},
    "spade": {"intermediate_size": 32, "num_attention_heads": 2, "sliding_window": 5, "ssm_trainable": "all"}
    | {"dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0},
    "bst": {
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "ssm_layers": [1],
    }
    | {"num_context_states": 2, "dropout": 0.0, "attention_dropout": 0.0, "final_dropout": 0.0},
    "lmu_isa": {"order": 8, "reduced_order": 4},
}
STEPS, ROWS, LENGTH = 3, 4, 12


def train(family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Mean loss over the whole batch at each step, and the weights at the end."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family]))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        assert len(blocks) == SIZES["num_hidden_layers"]
        for module in [*blocks, model]:
            fully_shard(module, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(parameter_groups(model, 1.0, lr=1e-2), eps=1e-3)  # rounding stays small
    losses = []
    for step in range(STEPS):
        ids = torch.randint(3, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(ranks)[rank]
        loss = model(mine, labels=mine).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    whole = {
        key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in model.state_dict().items()
    }
    return losses, {key: value.detach().clone() for key, value in whole.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {family: train(family) for family in FAMILIES}
    if int(os.environ["RANK"]) == 0:
        torch.save(found, sys.argv[1])
    dist.destroy_process_group()
