"""No training step and no decoded token makes the host wait for an accelerator."""

import pytest
import torch
from transformers import DynamicCache

from tests.host_syncs import as_on_an_accelerator, host_syncs
from tests.tiny_models import COMBINATIONS, EVERY, FEW, VARIANTS, batch_of, build, labels_for

# cuDNN takes the lengths of its rows from the host
TRAINED = [variant for variant in EVERY if variant != "spade lstm"]
DECODED = [variant for variant in TRAINED if not EVERY[variant][1].get("bidirectional")]
PACKABLE = [variant for variant in DECODED if EVERY[variant][0] != "spade_seq2seq"]
CLASSIFIERS = [(variant, name) for variant, name in COMBINATIONS if variant in FEW and "SequenceCl" in name]
# a document more is a row more, or a block more
COUNTING = [variant for variant in PACKABLE if variant.startswith(("bst mf", "bst with memory", "bst block"))]
TAKEN_APART = [variant for variant in PACKABLE if variant.startswith("lmu-isa")]
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo")


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch):
    """What runs on an accelerator without kernels: those for CPUs read what they like."""
    monkeypatch.setattr("hf_hybrid_ssm.ops.core.dispatch._ENVIRONMENT_BACKEND", "torch")


def padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :4], mask[1, -3:] = 0, 0
    return batch | {"attention_mask": mask}


def packed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    starts = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]), torch.tensor([0] * 13 + [1])
    return batch | {"seq_idx": torch.stack(starts).cumsum(1)}


def packed_by_ends(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ends = torch.tensor([0, 3, 11, 12, 14])
    return {name: tensor[:1] for name, tensor in batch.items()} | {"cu_seq_lens_q": ends}


def loss_and_gradients(model, inputs) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("rows", [dict, padded], ids=["plain", "padded"])
@pytest.mark.parametrize("variant", TRAINED)
def test_a_training_step_reads_nothing(variant, rows):
    model, inputs = build(variant), rows(batch_of(variant))
    inputs["labels"] = labels_for(model, inputs["input_ids"])
    assert host_syncs(lambda: loss_and_gradients(model.train(), inputs)) == []


@pytest.mark.parametrize("rows", [dict, padded], ids=["plain", "padded"])
@pytest.mark.parametrize(("variant", "name"), CLASSIFIERS)
def test_a_step_of_a_classifier_reads_nothing(variant, name, rows):
    model, inputs = build(variant, name), rows(batch_of(variant))
    inputs["labels"] = labels_for(model, inputs["input_ids"])
    assert host_syncs(lambda: loss_and_gradients(model.train(), inputs)) == []


@pytest.mark.parametrize("variant", [variant for variant in PACKABLE if variant not in TAKEN_APART])
def test_packed_rows_are_read_at_the_door_or_not_at_all(variant):
    """Once for all layers where blocks have to be counted, and not even then if the caller said where they end."""
    model, inputs = build(variant).train(), packed(batch_of(variant))
    ends = packed_by_ends(batch_of(variant))
    reads = host_syncs(lambda: loss_and_gradients(model, inputs))
    assert len(reads) == (variant in COUNTING) and all("max_documents" in read for read in reads)
    assert host_syncs(lambda: loss_and_gradients(model, ends)) == []


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant in PACKABLE])
@pytest.mark.parametrize("rows", [dict, padded, packed, packed_by_ends])
def test_what_is_not_read_changes_nothing(variant, rows):
    """Losses and gradients are those of a host that looks at masks and documents."""
    model, inputs = build(variant).double(), rows(batch_of(variant))
    expected = loss_and_gradients(model, inputs)
    with as_on_an_accelerator():
        found = loss_and_gradients(model, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("variant", DECODED)
@torch.no_grad()
def test_a_decoded_token_reads_nothing(variant, with_mask):
    model, inputs = build(variant), padded(batch_of(variant))
    mask = inputs["attention_mask"]
    options = {"use_cache": True}
    if model.config.is_encoder_decoder:
        options |= {"encoder_outputs": model.get_encoder()(inputs["input_ids"], mask), "attention_mask": mask}
        first, step = ({"decoder_input_ids": inputs["input_ids"][:, :size]} for size in (5, 1))
    else:
        options["past_key_values"] = DynamicCache(config=model.config)
        first, step = ({"input_ids": inputs["input_ids"][:, :size]} for size in (14, 1))
        if with_mask:
            first["attention_mask"] = mask
            step["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    past = model(**first, **options).past_key_values
    options["past_key_values"] = past
    if not model.config.is_encoder_decoder:
        options["continues_documents"] = True
    assert host_syncs(lambda: model(**step, **options)) == []


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant in PACKABLE])
@torch.no_grad()
def test_generated_texts_read_nothing_but_the_stop(variant):
    """`generate` asks once a token whether every row has ended, and that is all."""
    model, inputs = build(variant), padded(batch_of(variant))
    inputs["attention_mask"][:, -3:] = 1
    del inputs["labels"]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    reads = host_syncs(lambda: model.generate(**inputs, **options))
    assert [read for read in reads if "hf_hybrid_ssm" in read] == []


def test_reads_are_found():
    """Each way to wait is one that the count knows."""
    x = torch.arange(6.0)
    masked = (lambda: x[x > 2], lambda: x.nonzero(), lambda: x.masked_select(x > 2), lambda: x.unique())
    values = (lambda: x.sum().item(), lambda: int(x.max()), lambda: bool(x.any()), lambda: torch.equal(x, x))
    copies = (lambda: x.tolist(), lambda: x.numpy(), lambda: x.repeat_interleave(x.long()))
    for read in (*masked, *values, *copies, lambda: torch.tensor([1, 2])):
        assert len(host_syncs(read)) >= 1
    assert host_syncs(lambda: torch.where(x > 2, x, 0.0)[x.long()].cumsum(0)) == []


def test_a_mask_that_hides_nothing_is_not_looked_at():
    model, inputs = build("longhorn").double(), batch_of("longhorn")
    expected = model(**inputs).logits
    with as_on_an_accelerator():
        found = model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
