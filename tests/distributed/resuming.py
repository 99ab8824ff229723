"""Small models trained in shards or in copies, saved half-way, and taken up by another number of processes."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_hybrid_ssm.training.optim import parameter_groups
from tests.tiny_models import VOCABULARY, built

DROPOUTS = {
    "longhorn": (),
    "spade": ("dropout", "attention_dropout", "embedding_dropout"),
    "bst sh": ("dropout", "attention_dropout", "final_dropout"),
    "lmu_isa": (),
}
STEPS, HALF, ROWS, LENGTH = 4, 2, 4, 20


def model_of(case: str) -> PreTrainedModel:
    return built(case, **dict.fromkeys(DROPOUTS[case], 0.0))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model, 0.1, lr=1e-2), eps=1e-3)  # rounding stays small


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Mean loss over all processes' rows at the steps first … last - 1."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in range(first, last):
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(ranks)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def sharded(model: PreTrainedModel) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*(m for m in model.modules() if type(m).__name__ in model._no_split_modules), model]:
        fully_shard(module, mesh=mesh)
    return model


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Every process writes its own shards."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=not dist.is_initialized())


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Every process reads what its own shards need."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def spoilt(model: PreTrainedModel) -> PreTrainedModel:
    """Other weights than those that are saved, so that a checkpoint that is not read is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def prepare(folder: Path) -> None:
    """One process trains all steps and saves half-way; losses and last weights go to FOLDER/alone.pt."""
    alone = {}
    for case in DROPOUTS:
        model = model_of(case)
        optimizer = optimizer_of(model)
        losses = train(model, optimizer, 0, HALF)
        save(model, optimizer, folder / "one" / case)
        losses += train(model, optimizer, HALF, STEPS)
        alone[case] = losses, whole(model)
    torch.save(alone, folder / "alone.pt")


def main(folder: Path) -> None:
    """Losses and weights of all processes together go to FOLDER/together.pt."""
    found = {}
    for case in DROPOUTS:
        model = sharded(model_of(case))
        optimizer = optimizer_of(model)
        losses = train(model, optimizer, 0, HALF)
        save(model, optimizer, folder / "two" / case)
        model = sharded(spoilt(model_of(case)))
        optimizer = optimizer_of(model)
        resume(model, optimizer, folder / "one" / case)
        again = train(model, optimizer, HALF, STEPS)

        copy = model_of(case)
        copy.gradient_checkpointing_enable({"use_reentrant": False})
        copies = DistributedDataParallel(copy)
        with_checkpointing = train(copies, optimizer_of(copies), 0, STEPS)
        found[case] = {
            "first half, two processes": losses,
            "second half, from one to two processes": (again, whole(model)),
            "checkpointing, two processes": (with_checkpointing, whole(copy)),
        }
    if dist.get_rank() == 0:
        torch.save(found, folder / "together.pt")
