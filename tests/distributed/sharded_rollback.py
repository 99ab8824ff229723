"""Logits after a rollback, of models in shards of FSDP2: each block a unit, and the whole."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import DynamicCache, EncoderDecoderCache

from tests.tiny_models import own_language_model, recording_cache

CASES = [
    "longhorn + window and full attention",
    "student: groups",
    "student with a mixer",
    "bst mh s4",
    "lmu-isa",
    "spade s4 window",
    "encoder-decoder",
]


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def after_rollback(model) -> torch.Tensor:
    """Seven tokens are read, three undone, and two read again."""
    cache, source = recording_cache(model), {}
    if model.config.is_encoder_decoder:
        cache, source = EncoderDecoderCache(cache, DynamicCache(config=model.config)), {"input_ids": ids_of(5, 1)}
    name = "decoder_input_ids" if source else "input_ids"
    model(**source, **{name: ids_of(7)}, past_key_values=cache)
    cache.crop(-3)
    return model(**source, **{name: ids_of(2, 2)}, past_key_values=cache).logits


def main(folder: Path) -> None:
    """What this process finds goes to FOLDER/rollback-RANK.pt."""
    mesh, found = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for case in CASES:
        model = own_language_model(case)
        stacks = (model.model.encoder, model.model.decoder) if model.config.is_encoder_decoder else (model.model,)
        for block in (block for stack in stacks for block in stack.layers):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found[case] = after_rollback(model)
    torch.save(found, folder / f"rollback-{dist.get_rank()}.pt")
