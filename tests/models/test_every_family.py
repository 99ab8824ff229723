"""What users of transformers do with any model, for every family and variant: LoRA, compiling, checkpointing."""

import copy

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers.generation.streamers import BaseStreamer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.matrix.checks import EVERY_FAMILY, without_dropout
from tests.models import invariances as inv
from tests.tiny_models import (
    OF_FAMILIES,
    VARIANTS,
    batch_of,
    compiles,
    config_of,
    language_model,
    own_language_model,
    shallow_language_model,
)

EVERY = pytest.mark.parametrize("variant", VARIANTS)


def training_without_dropout(variant):
    return without_dropout(own_language_model(variant).train())


def step(model, batch):
    """The output of a training step, and its gradients."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_what_stays_float32_is_made_so(variant, dtype):
    """Whatever the default dtype is when a model is built, as in `from_config(dtype=...)`."""
    config, default = language_model(variant).config, torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = type(language_model(variant))(config)
    finally:
        torch.set_default_dtype(default)
    names = set(model._keep_in_fp32_modules_strict or ())
    kept = {name: part.dtype for name, part in model.named_parameters() if name.rpartition(".")[2] in names}
    assert set(kept.values()) <= {torch.promote_types(dtype, torch.float32)} and bool(kept) == bool(names)


WITH_DECODER = pytest.mark.parametrize("variant", [*VARIANTS, "encoder-decoder", "encoder-decoder relative window"])


@pytest.mark.parametrize("variant", [*OF_FAMILIES, "encoder-decoder", "encoder-decoder relative window"])
def test_all_that_is_dropped_is_dropped_by_modules(variant):
    """By which other programs turn it off, as trl does in training on preferences. (The attention of a student is its
    teacher's, in which transformers has a number for it.)"""
    rates = {name: 0.5 for name in vars(language_model(variant).config) if "dropout" in name}
    torch.manual_seed(0)
    model, batch = type(language_model(variant))(config_of(variant, **rates)).train(), batch_of(variant)
    drops = not torch.equal(model(**batch).logits, model(**batch).logits)
    assert drops or variant in ("longhorn", "longhorn conv of 2")
    without_dropout(model)
    assert torch.equal(model(**batch).logits, model(**batch).logits)


@WITH_DECODER
def test_gradient_checkpointing_changes_no_gradient(variant):
    model, batch = training_without_dropout(variant), batch_of(variant)
    plain = step(model, batch)[1]
    model.gradient_checkpointing_enable()
    again = step(model, batch)[1]
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("variant", [*OF_FAMILIES, "encoder-decoder", "longhorn untied", "lmu-isa untied"])
def test_a_loss_without_logits_is_the_loss_with_them(variant):
    model, batch = training_without_dropout(variant), batch_of(variant)
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] % 5 == 0, -100)
    plain, gradients = step(model, batch)
    model.config.use_linear_cross_entropy = True
    fused, found = step(model, batch)
    assert fused.logits is None and plain.logits is not None
    torch.testing.assert_close(fused.loss, plain.loss)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@WITH_DECODER
def test_a_folder_read_in_bfloat16_keeps_what_stays_float32(variant, tmp_path):
    model = own_language_model(variant)
    model.save_pretrained(tmp_path)
    loaded, names = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16), model._keep_in_fp32_modules_strict
    assert loaded.get_input_embeddings().weight.dtype == torch.bfloat16
    for name, part in loaded.named_parameters():
        kept = name.rpartition(".")[2] in names
        assert part.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert not kept or torch.equal(part, model.get_parameter(name)), name
    assert loaded(**batch_of(variant)).loss.isfinite()


# tests/matrix compiles forward and backward of a variant of each family
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in EVERY_FAMILY])
@compiles
def test_forward_compiles_into_one_graph(variant):
    torch._dynamo.reset()  # the graphs of the variant before count against a limit
    model = shallow_language_model(variant)
    ids = inv.random_ids(model, 2, 14, 0)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        got = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(got, inv.whole(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "encoder-decoder"])
def test_a_trainer_knows_classes_whose_labels_it_shifts(variant):
    """By name: also a subclass, and what `fully_shard` makes of a class."""
    own = type(language_model(variant))
    for cls in (own, type("Mine", (own,), {}), type(f"FSDP{own.__name__}", (FSDPModule, own), {})):
        assert cls.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert (
        "SpadeForConditionalGeneration" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )  # its labels are not shifted


@EVERY
def test_a_trainer_with_liger_kernels_evaluates(variant):
    """It hands on an argument of liger's, which has no kernels for these models; transformers' own ignore it too."""
    model, batch = language_model(variant), batch_of(variant)
    with torch.no_grad():
        assert torch.equal(model(**batch, skip_logits=True).logits, model(**batch).logits)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_generate_and_stay_near(variant, dtype):
    exact = language_model(variant)
    model = copy.deepcopy(exact).to(dtype)
    ids = inv.random_ids(model, 2, 14, 0)
    with torch.no_grad():
        logits, expected = model(ids).logits, inv.whole(exact, ids)
    assert logits.dtype == dtype
    error = (logits.double() - expected.double()).norm() / expected.double().norm()
    assert error < (0.1 if dtype == torch.bfloat16 else 1e-5)
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 17)


@WITH_DECODER
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"do_sample": True, "num_beams": 2}],
    ids=["beams", "samples", "drawn beams"],
)
def test_beams_and_samples_do_not_depend_on_the_cache(variant, options):
    model = language_model(variant)
    ids, texts = inv.random_ids(model, 2, 9, 0), []
    for use_cache in (True, False):
        torch.manual_seed(0)
        settings = {"max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0, "do_sample": False} | options
        texts.append(model.generate(ids, use_cache=use_cache, **settings))
    assert texts[0].tolist() == texts[1].tolist()


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens: list[int | str] = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


@WITH_DECODER
def test_streams_stops_and_says_scores(variant):
    """A streamer gets each token and the end; an end token ends; outputs as a dictionary have finite scores."""
    model, collector = language_model(variant), Collector()
    ids, options = inv.random_ids(model, 1, 9, 0), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found = model.generate(ids, streamer=collector, min_new_tokens=5, **options, **more)
    text = found.sequences[0].tolist()
    assert collector.tokens == [*text, "end"]
    assert len(found.scores) == len(found.logits) == 5
    assert all(torch.isfinite(logits).all() for logits in found.logits)
    end = text[-3]
    stopped = model.generate(ids, eos_token_id=end, **options)[0].tolist()
    assert stopped == text[: len(stopped)] and stopped[-1] == end and len(stopped) <= len(text) - 2


@EVERY
def test_trains_on_one_batch(variant):
    model = own_language_model(variant).train()
    ids = inv.random_ids(model, 2, 14, 0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
