"""Logits and gradients of saved models whose layers are spread over the processes, by transformers' own plans.

python -m torch.distributed.run --nproc_per_node 2 tensor_parallel_worker.py FOLDER tensor|pipeline
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_hybrid_ssm  # noqa: F401 - registers the families


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loaded(folder: Path, **options) -> PreTrainedModel:
    auto = AutoModelForSeq2SeqLM if "seq2seq" in folder.name else AutoModelForCausalLM
    return auto.from_pretrained(folder, **options)


def inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two rows of different length."""
    ids = torch.randint(3, model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask} | ({"labels": ids} if model.config.is_encoder_decoder else {})


def answers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Logits, without gradients and with them, and the gradient of every parameter."""
    model.eval()
    given = inputs(model)
    with torch.no_grad():
        found = {"logits": whole(model(**given).logits)}
    outputs = model(**given)
    found["logits with gradients"] = whole(outputs.logits).detach()
    (whole(outputs.logits) ** 2).mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = whole(parameter.grad)
    return found


def text(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Logits, and what is generated after them."""
    given = inputs(model.eval())
    with torch.no_grad():
        return {
            "logits": model(**given, use_cache=False).logits,
            "text": model.generate(**given, max_new_tokens=8, do_sample=False),
        }


def shares(model: PreTrainedModel) -> tuple[int, int]:
    """Numbers this process holds, and numbers of the whole model."""
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    return held, sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    found = {}
    for saved in sorted(folder.iterdir()):
        if kind == "tensor":
            model = loaded(saved, distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"))
            found[saved.name] = (answers(model), shares(model))
        else:
            model = loaded(saved, distributed_config=DistributedConfig(pp_size=ranks))
            found[saved.name] = (text(model), shares(model))
    torch.save(found, folder.with_name(f"{kind}-{os.environ['RANK']}.pt"))
    dist.destroy_process_group()
