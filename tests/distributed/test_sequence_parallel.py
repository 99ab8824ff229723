"""Longhorn on rows cut between processes: one process with the whole rows computes the same."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DynamicCache

from hf_hybrid_ssm.models.state_layers import RecurrentStateLayer
from hf_hybrid_ssm.training.sequence_parallel import forward_shard
from tests.distributed.sequence_parallel import cases, longhorn, rows
from tests.tiny_models import FEW, build, built

RANKS = (0, 1)


@pytest.fixture(scope="module")
def found(two_processes):
    return [torch.load(two_processes / f"sequence-{rank}.pt") for rank in RANKS]


@pytest.mark.parametrize("case", cases())
def test_pieces_are_the_whole(found, case):
    """Logits side by side in float64; losses added up and gradients on every process, which come by a float32 loss."""
    model = longhorn()
    outputs = model(**cases()[case])
    outputs.loss.backward()
    exact, close = {"rtol": 1e-10, "atol": 1e-12}, {"rtol": 1e-5, "atol": 1e-7}
    pieces = [rank[case] for rank in found]
    torch.testing.assert_close(torch.cat([piece["logits"] for piece in pieces], 1), outputs.logits.detach(), **exact)
    torch.testing.assert_close(sum(piece["loss"] for piece in pieces), outputs.loss.detach(), **close)
    assert outputs.loss > 0
    for piece in pieces:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(piece["gradients"][name], parameter.grad, **close, msg=f"{case} {name}")


def test_decoding_goes_on_where_the_last_piece_ends(found):
    ids = rows(33)["input_ids"]
    model = longhorn().eval()
    expected = model.generate(ids, max_new_tokens=7, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(found[-1]["text"], expected) and "text" not in found[0]


@pytest.mark.parametrize("variant", [*FEW[:3], "student: groups", "student with a mixer", "spade s4 window"])
def test_every_layer_asks_once_for_its_states_and_replaces_them_once(variant, monkeypatch):
    """What a layer of the cache that fetches its states relies on, for rows, a piece and a token."""
    model, events = build(variant), []
    cache = DynamicCache(config=model.config)
    for name in ("states_before", "update_states"):
        method = getattr(RecurrentStateLayer, name)

        def noted(layer, *arguments, name=name, method=method):
            events.append((name, cache.layers.index(layer)))
            return method(layer, *arguments)

        monkeypatch.setattr(RecurrentStateLayer, name, noted)
    for length in (5, 3, 1):
        events.clear()
        with torch.no_grad():
            model(torch.ones(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
        own = [index for index, layer in enumerate(cache.layers) if isinstance(layer, RecurrentStateLayer)]
        assert events == [(name, index) for index in own for name in ("states_before", "update_states")] and own


def test_refusals():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        with pytest.raises(ValueError, match="only stacks of Longhorn layers"):
            forward_shard(built("longhorn hybrid"), rows(9)["input_ids"])
        with pytest.raises(ValueError, match="only stacks of Longhorn layers"):
            forward_shard(built("lmu_isa"), rows(9)["input_ids"])
        with pytest.raises(ValueError, match="only stacks of Longhorn layers"):
            forward_shard(built("student with a mixer"), rows(9)["input_ids"])
        with pytest.raises(ValueError, match="2 tokens a row for 3 processes"):
            forward_shard(longhorn(), rows(2)["input_ids"])
        model = longhorn()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with pytest.raises(ValueError, match="gradient checkpointing"):
            forward_shard(model, rows(9)["input_ids"])
    finally:
        dist.destroy_process_group()
