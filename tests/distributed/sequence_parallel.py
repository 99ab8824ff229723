"""Logits, loss, gradients and decoded text of a Longhorn whose rows are cut into one piece for each process."""

from pathlib import Path

import torch
import torch.distributed as dist

from hf_hybrid_ssm.training.sequence_parallel import forward_shard, sum_gradients
from tests.tiny_models import VOCABULARY, built

LENGTHS = (2, 5, 33)  # pieces shorter and longer than the convolution, of different length
DOCUMENTS = ([0] * 16 + [1] * 17, [0] * 7 + [1] * 13 + [2] * 13)  # one begins where the second of two pieces does


def rows(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


def cases() -> dict[str, dict[str, torch.Tensor]]:
    found = {f"{length} tokens": rows(length) for length in LENGTHS}
    found["packed"] = {**rows(33), "seq_idx": torch.tensor(DOCUMENTS)}
    found["ignored"] = {**rows(33)}
    found["ignored"]["labels"] = found["ignored"]["labels"].clone()
    found["ignored"]["labels"][:, 10:] = -100  # the last piece has nothing to learn from
    return found


def longhorn():
    return built("longhorn", torch.float64).train()


def main(folder: Path) -> None:
    """What this process finds goes to FOLDER/sequence-RANK.pt."""
    found = {}
    for name, given in cases().items():
        model = longhorn()
        outputs = forward_shard(model, **given)
        outputs.loss.backward()
        sum_gradients(model)
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        found[name] = {"logits": outputs.logits.detach(), "loss": outputs.loss.detach(), "gradients": gradients}
    model = longhorn().eval()
    with torch.no_grad():
        outputs = forward_shard(model, rows(33)["input_ids"])
    if outputs.past_key_values is not None:
        first = outputs.logits[:, -1:].argmax(-1)
        ids = torch.cat([rows(33)["input_ids"], first], 1)
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        found["text"] = model.generate(ids, past_key_values=outputs.past_key_values, **options)
    torch.save(found, folder / f"sequence-{dist.get_rank()}.pt")
