"""Saved models whose layers are spread over the processes, by transformers' own tensor and pipeline parallelism."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_hybrid_ssm  # noqa: F401 - registers the families
from tests.tiny_models import built

TENSOR = [
    "longhorn",
    "longhorn hybrid",
    "student",
    "student with a mixer",
    "spade",
    "bst mh",
    "bst mf",
    "lmu_isa",
    "lmu_isa global",
    "spade_seq2seq",
]
PIPELINE = ["longhorn", "longhorn hybrid", "bst sh", "lmu_isa", "spade chunk", "student", "student with a mixer"]


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


def training_loss(model: PreTrainedModel) -> torch.Tensor:
    """With the loss that holds no logits, where the head is whole."""
    model.config.use_linear_cross_entropy = True
    return model.train()(**inputs(model) | {"labels": inputs(model)["input_ids"]}).loss.detach()


def text(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Logits, and what is generated after them."""
    given = {name: value for name, value in inputs(model.eval()).items() if name != "labels"}
    targets = {"decoder_input_ids": given["input_ids"]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return {
            "logits": whole(model(**given, **targets, use_cache=False).logits),
            "text": model.generate(**given, max_new_tokens=8, do_sample=False),
        }


def shares(model: PreTrainedModel) -> tuple[int, int]:
    """Numbers this process holds, and numbers of the whole model."""
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    return held, sum(p.numel() for p in model.parameters())


def prepare(folder: Path) -> None:
    """The models, as any checkpoint is saved."""
    for case in dict.fromkeys(TENSOR + PIPELINE):
        built(case, use_cache=True).save_pretrained(folder / "models" / case)


def main(folder: Path) -> None:
    """What this process finds goes to FOLDER/parallel-RANK.pt: answers or text, and the process's share of numbers."""
    ranks = dist.get_world_size()
    found = {}
    for case in TENSOR:
        model = loaded(folder / "models" / case, distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"))
        found["text", case] = text(model)
        found["tensor", case] = (answers(model), shares(model))
        if case == "longhorn":
            found["loss"] = training_loss(model)
    for case in PIPELINE:
        model = loaded(folder / "models" / case, distributed_config=DistributedConfig(pp_size=ranks))
        found["pipeline", case] = (text(model), shares(model))
    torch.save(found, folder / f"parallel-{dist.get_rank()}.pt")
