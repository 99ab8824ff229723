"""Rows of a batch that end early go on in the next turn as if each had been alone; what a mask says of the past must
be what was read."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
)

from hf_hybrid_ssm.models.packing import signature
from hf_hybrid_ssm.serving import load_context, save_context
from tests.models.invariances import TOLERANCE, pad_rows
from tests.tiny_models import LONGHORN, ROWS, TOKENS, compiles, empty_cache, language_model

CAUSAL = [row for row in ROWS if row != "encoder-decoder"]
NEW_TOKENS, PAD, END = 8, 0, 2
SOURCE = torch.tensor([[5, 6, 7, 8, 9]]).repeat(3, 1)


def ids_of(length: int, seed: int, rows: int = 3) -> torch.Tensor:
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(model, ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    if model.config.is_encoder_decoder:
        return {"input_ids": SOURCE[: len(ids)], "decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def whole(model, ids: torch.Tensor) -> torch.Tensor:
    return model(**inputs_of(model, ids, None), use_cache=False).logits


def says(lengths: dict[int, int], prompt: int):
    """What may come next: rows end (with token 2) after so many tokens, the others do not."""

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [END] if len(ids) - prompt == lengths.get(row, NEW_TOKENS) - 1 else list(range(3, 61))

    return allowed


def first_turn(model, cache, **options):
    """Three left-padded rows, of which two end early: what was said, and what of it is text."""
    ids, mask = pad_rows([ids_of(length, length, rows=1) for length in (4, 7, 6)], PAD, "left")
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD, "eos_token_id": END, **options}
    settings |= {"prefix_allowed_tokens_fn": says({0: 2, 1: 5}, ids.shape[1]), "past_key_values": cache}
    said = model.generate(**inputs_of(model, ids, mask), **settings)
    real = torch.ones(3, NEW_TOKENS, dtype=torch.long)
    real[0, 2:], real[1, 5:] = 0, 0
    assert torch.equal(said[:, ids.shape[1] :] == PAD, real == 0)
    return said, torch.cat([mask, real], 1)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("variant", ROWS)
def test_the_next_turn_of_a_row_that_ended_early_is_its_own(variant, static):
    model = language_model(variant)
    cache = empty_cache(model, 40 if static else None)
    said, mask = first_turn(model, cache)
    turn = ids_of(4, 3)
    ids, mask = torch.cat([said, turn], 1), torch.cat([mask, torch.ones_like(turn)], 1)
    seen = int(cache.get_seq_length())
    assert seen == said.shape[1] - 1
    with torch.no_grad():
        logits = model(**inputs_of(model, ids[:, seen:], mask), past_key_values=cache).logits
    for row in range(3):
        alone = whole(model, ids[row][mask[row].bool()][None])[0, -4:]
        torch.testing.assert_close(logits[row, -4:], alone, rtol=1e-4, atol=2e-5)


@compiles
@pytest.mark.parametrize("variant", ["longhorn", "longhorn + window and full attention"])
def test_compiled_steps_of_ended_rows(variant):
    """One graph for steps of which all rows go on, and one for the others, however many there are."""
    model = language_model(variant)
    torch._dynamo.reset()
    options = {"compile_config": CompileConfig(backend="eager", mode=None, dynamic=False)}
    options["compile_config"]._compile_all_devices = True
    counted = torch._dynamo.utils.counters
    counted.clear()
    caches = [empty_cache(model, 40) for _ in range(2)]
    said = [first_turn(model, cache, **more) for cache, more in zip(caches, ({}, options))]
    assert torch.equal(said[0][0], said[1][0])
    assert 0 < counted["stats"]["unique_graphs"] <= NEW_TOKENS - 2  # before 5.18 three of each kind, now two
    with torch.no_grad():
        turn, mask = ids_of(2, 4), torch.cat([said[0][1], torch.ones(3, 2, dtype=torch.long)], 1)
        ids = torch.cat([said[0][0][:, -1:], turn], 1)
        got, want = (model(ids, attention_mask=mask, past_key_values=cache).logits for cache in reversed(caches))
    torch.testing.assert_close(got[:, 1:], want[:, 1:], rtol=1e-4, atol=2e-5)


def steps_of(model, **options) -> list[bool]:
    """Of each step of `generate` after the first forward: whether it took all its tokens for text, unseen."""
    found, ids = [], ids_of(5, 1)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD, "eos_token_id": END, **options}
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs["continues_documents"]), with_kwargs=True
    )
    model.generate(ids, prefix_allowed_tokens_fn=says({0: 4}, 5), **settings)
    handle.remove()
    return found[1:]


@pytest.mark.parametrize("variant", ["longhorn", "bst sh s4d"])
def test_steps_are_those_of_text_until_a_row_ends_and_where_the_cache_is_thrown_away(variant):
    model = language_model(variant)
    assert set(steps_of(model)) == {True}
    kept = steps_of(model, return_dict_in_generate=True)
    assert kept == [True] * 4 + [False] * 3  # the first row's end is text, and read
    assert set(steps_of(model, return_dict_in_generate=True, num_beams=2)) == {True}


@pytest.mark.parametrize("variant", CAUSAL)
def test_a_turn_without_a_mask_knows_what_was_padding(variant):
    """`generate` finds the padding among the tokens itself, where it is no token of the text's."""
    model = language_model(variant)
    cache = empty_cache(model)
    said, mask = first_turn(model, cache)
    ids = torch.cat([said, ids_of(3, 5)], 1)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    found = model.generate(ids, past_key_values=cache, **options)[:, -3:]
    mask = torch.cat([mask, torch.ones(3, 3, dtype=torch.long)], 1)
    for row in range(3):
        alone = model.generate(ids[row][mask[row].bool()][None], **options)[0, -3:]
        assert found[row].tolist() == alone.tolist()


# -- masks that contradict what was read ------------------------------------------------------------------------------

REFUSED = "attention_mask calls other columns of the past padding than the forwards that read them"


def contradictions(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Masks over the past that say something else than `mask`, whose row 1 begins with padding."""
    text, more, moved = mask.clone(), mask.clone(), mask.clone()
    text[1, :2] = 1
    more[0, 1] = 0
    moved[1] = mask[1].roll(3)
    return {"padding called text": text, "text called padding": more, "padding elsewhere": moved}


@pytest.mark.parametrize("variant", ["longhorn", "bst mh s4", "lmu-isa + global attention"])
def test_rollback_and_contexts_keep_what_was_padding(variant, tmp_path):
    model = language_model(variant)
    ids, mask = ids_of(8, 1), torch.ones(3, 8, dtype=torch.long)
    mask[1, :2], mask[0, 3], mask[2, 6:] = 0, 0, 0
    cache, step, now = empty_cache(model), ids_of(2, 2), torch.ones(3, 2, dtype=torch.long)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :4], attention_mask=mask[:, :4], past_key_values=cache)
        model(ids[:, 4:], attention_mask=mask, past_key_values=cache)
        cache.crop(-3)
        with pytest.raises(ValueError, match=REFUSED):
            model(step, attention_mask=torch.cat([torch.ones_like(mask[:, :5]), now], 1), past_key_values=cache)
        save_context(cache, tmp_path / "rows.safetensors", model)
        loaded = load_context(tmp_path / "rows.safetensors", model).past_key_values
        for held in (cache, loaded):
            with pytest.raises(ValueError, match=REFUSED):
                model(step, attention_mask=torch.cat([contradictions(mask[:, :5])["padding elsewhere"], now], 1),
                      past_key_values=held)  # fmt: skip
            got = model(step, attention_mask=torch.cat([mask[:, :5], now], 1), past_key_values=held).logits
            alone = whole(model, torch.cat([ids[1:2, 2:5], step[1:2]], 1))[0, -2:]
            torch.testing.assert_close(got[1], alone, **TOLERANCE)


def test_keys_and_values_alone_may_be_hidden_later():
    """A model with full attention only forgets nothing: its masks may change."""
    config = AutoConfig.for_model("longhorn", **TOKENS, **LONGHORN | {"layer_types": ["full_attention"] * 3})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, cache = ids_of(6, 1), DynamicCache(config=config)
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, :2] = 0
    with torch.no_grad():
        model(ids, past_key_values=cache)
        logits = model(ids[:, :2], attention_mask=mask, past_key_values=cache).logits
    assert not torch.allclose(logits[1], whole(model, torch.cat([ids, ids[:, :2]], 1))[1, -2:])


def test_a_static_cache_does_not_know_which_columns_were_padding():
    """Layers that attend to columns ask for a mask of all of them, where states alone need none."""
    ids, mask = ids_of(6, 1), torch.ones(3, 6, dtype=torch.long)
    mask[1, :2] = 0
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    for variant, needs_all in (("longhorn + window and full attention", True), ("longhorn", False)):
        model = language_model(variant)
        cache = empty_cache(model, 40)
        said = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
        with torch.no_grad():
            if needs_all:
                with pytest.raises(ValueError, match="it is not known where: give an attention_mask of all tokens"):
                    model(said[:, -1:], past_key_values=cache)
            else:
                alone = whole(model, said[1:2, 2:])[0, -1]
                torch.testing.assert_close(model(said[:, -1:], past_key_values=cache).logits[1, 0], alone, **TOLERANCE)


def test_the_signature_is_that_of_the_columns():
    padded = torch.rand(64, 40, generator=torch.Generator().manual_seed(0)) < 0.3
    found = signature(padded)
    assert len(set(found.tolist())) == 64 and not signature(torch.zeros(2, 40, dtype=torch.bool)).any()
    for cut in (0, 1, 17, 40):
        pieces = signature(padded[:, :cut]) + signature(padded[:, cut:], cut)
        assert torch.equal(pieces, found)
    once = signature(torch.eye(2000, dtype=torch.bool))
    assert len(set(once.tolist())) == 2000
    pairs = once[:200, None] + once[None, :200]  # no two pairs of columns look alike, as their sums do
    assert len(set(pairs[torch.triu(torch.ones(200, 200)).bool()].tolist())) == 200 * 201 // 2
