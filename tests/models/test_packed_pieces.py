"""Packed rows: each document is what it is alone: at once, in pieces, in every head, compiled, after a rollback."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
)

from hf_hybrid_ssm.models.packing import resolve_packing
from hf_hybrid_ssm.ops.core import rows as rows_module
from tests.models import invariances as inv
from tests.models.test_span_and_token_heads import EVERY_HEAD, EVERY_ROW, ids_of, scores
from tests.models.test_span_and_token_heads import build as build_head
from tests.tiny_models import (
    ROWS,
    SEQ2SEQ,
    TOKENS,
    VARIANTS,
    batch_of,
    compiles,
    language_model,
    own_language_model,
    recording_cache,
)

EVERY = pytest.mark.parametrize("variant", VARIANTS)
FAMILIES = ["longhorn + window and full attention", "bst sh s4d", "lmu-isa + global attention", "spade s4 window"]
FULL_ALONE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "layer_types": ["full_attention"] * 2,
}
ROWS_OF_DOCUMENTS = [[5, 1, 7, 3], [2, 6, 6, 2]]  # lengths of documents, 16 tokens a row
BY = {"seq_idx": ["seq_idx"], "positions": ["position_ids"], "both": ["seq_idx", "position_ids"]}


def exact(variant: str) -> torch.nn.Module:
    return own_language_model(variant).double()


def full_alone() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", **TOKENS, **FULL_ALONE)).double().eval()


def packed(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """`seq_idx` and `position_ids` of rows of documents of these lengths."""
    numbers = [[index for index, length in enumerate(row) for _ in range(length)] for row in rows]
    positions = [[position for length in row for position in range(length)] for row in rows]
    return {"seq_idx": torch.tensor(numbers), "position_ids": torch.tensor(positions)}


@torch.no_grad()
def alone(model: torch.nn.Module, ids: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    """(B, L, V) the logits of each document without any other."""
    return torch.cat(
        [torch.cat([inv.whole(model, part[None]) for part in ids[b].split(row)], 1) for b, row in enumerate(rows)]
    )


def assert_exact(logits: torch.Tensor, expected: torch.Tensor) -> None:
    # filters are computed in float32 or wider: what is left is the rounding of another order of sums
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def in_pieces(model, ids, inputs: dict[str, torch.Tensor], cuts: list[int], cache) -> torch.Tensor:
    logits = []
    for a, b in pairwise([0, *cuts, ids.shape[1]]):
        piece = {name: tensor[:, a:b] for name, tensor in inputs.items()}
        logits.append(model(ids[:, a:b], past_key_values=cache, use_cache=True, **piece).logits)
    return torch.cat(logits, 1)


@EVERY
@settings(max_examples=5, deadline=None)
@given(by=st.sampled_from(sorted(BY)), cuts=st.sets(st.integers(1, 15), max_size=7))
def test_pieces_of_packed_rows(variant, by, cuts):
    model = exact(variant)
    ids = inv.random_ids(model, 2, 16, 0)
    inputs = {name: packed(ROWS_OF_DOCUMENTS)[name] for name in BY[by]}
    logits = in_pieces(model, ids, inputs, sorted(cuts), DynamicCache(config=model.config))
    assert_exact(logits, alone(model, ids, ROWS_OF_DOCUMENTS))


@EVERY
@pytest.mark.parametrize("by", ["seq_idx", "position_ids"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_pieces_that_begin_at_borders(variant, by, static):
    model = exact(variant)
    ids = inv.random_ids(model, 2, 16, 0)
    for cuts in ([5, 6, 13], [2, 8, 12, 13, 14, 15]):
        cache = StaticCache(config=model.config, max_cache_len=20) if static else DynamicCache(config=model.config)
        logits = in_pieces(model, ids, {by: packed(ROWS_OF_DOCUMENTS)[by]}, cuts, cache)
        assert_exact(logits, alone(model, ids, ROWS_OF_DOCUMENTS))


@EVERY
def test_text_goes_on_after_packed_rows(variant):
    """Without positions the tokens belong to each row's last document, wherever that began."""
    model = exact(variant)
    ids = inv.random_ids(model, 2, 16, 0)
    expected = alone(model, ids, ROWS_OF_DOCUMENTS)
    for by in BY.values():
        cache = DynamicCache(config=model.config)
        first = {name: packed(ROWS_OF_DOCUMENTS)[name][:, :15] for name in by}
        in_pieces(model, ids[:, :15], first, [], cache)
        with torch.no_grad():
            assert_exact(model(ids[:, 15:], past_key_values=cache, use_cache=True).logits, expected[:, 15:])


@EVERY
def test_pieces_of_packed_and_padded_rows(variant):
    """Padding between, before and after the documents of a row, named by `seq_idx`."""
    model = exact(variant)
    rows, ids = [[3, 4], [5, 2]], inv.random_ids(model, 2, 7, 0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1]])
    given, seq_idx = torch.zeros_like(mask), torch.zeros_like(mask)
    given[mask.bool()] = ids.flatten()
    seq_idx[mask.bool()] = packed(rows)["seq_idx"].flatten() + 1
    seq_idx = seq_idx.cummax(1).values
    expected = alone(model, ids, rows).flatten(0, 1)
    for cuts in ([6], [3, 5, 8, 11]):
        for whole_mask in (True, False):
            cache, logits = DynamicCache(config=model.config), []
            for a, b in pairwise([0, *cuts, 12]):
                real = mask[:, :b] if whole_mask else mask[:, a:b]
                inputs = {"attention_mask": real, "seq_idx": seq_idx[:, a:b], "cache": cache}
                with torch.no_grad():
                    logits.append(model(given[:, a:b], use_cache=True, **inputs).logits)
            assert_exact(torch.cat(logits, 1)[mask.bool()], expected)


@EVERY
@pytest.mark.parametrize("removed", [4, 5, 6])
def test_rollback_over_a_border(variant, removed):
    """A cache that went into the next document comes back to the one before."""
    model = exact(variant)
    ids, rows = inv.random_ids(model, 2, 10, 0), [[5, 5], [5, 5]]
    for by in ("seq_idx", "position_ids"):
        inputs = {by: packed(rows)[by]}
        cache = recording_cache(model)
        in_pieces(model, ids, inputs, [2, 5, 7], cache)
        cache.crop(-removed)
        kept = 10 - removed
        tail = inv.random_ids(model, 2, 3, 1)
        with torch.no_grad():
            logits = model(tail, past_key_values=cache, use_cache=True).logits
        start = 0 if kept <= 5 else 5
        text = torch.cat([ids[:, start:kept], tail], 1)
        assert_exact(logits, inv.whole(model, text)[:, -3:])


def test_the_first_tokens_of_padded_rows():
    """What a rollback sees: a row that has only read padding has not begun its next document."""
    held = 3, {"document": torch.tensor([1, 1]), "start": torch.tensor([0, 0])}
    given = {"seq_idx": torch.ones(2, 4, dtype=torch.int64), "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4])}
    rows = resolve_packing((2, 4), held, **given, needs_starts=True)
    assert rows.starts_new_document.tolist() == [True, True] and rows.packing_state["document"].tolist() == [3, 3]
    first, state = rows.first(2), {"state": torch.ones(2, 1)}
    assert first.starts_new_document.tolist() == [False, True] and first.lengths.tolist() == [0, 2]
    assert first.packing_state["document"].tolist() == [1, 3] and first.packing_state["start"].tolist() == [0, 3]
    assert first.continued(state)["state"].tolist() == [[1.0], [0.0]]
    moved = rows.to("meta")  # as accelerate does for a layer on another device
    assert moved.padding.order.is_meta and moved.packing_state["document"].is_meta and not rows.padding.order.is_meta


@EVERY
@pytest.mark.parametrize("cached", [False, True])
def test_rows_are_checked_once_a_forward(variant, cached, monkeypatch):
    """Whatever the number of layers, and of ops in them: all are given the same `Rows`."""
    model, checks = exact(variant), []
    for name in ("check_seq_idx", "check_mask_values"):
        check = getattr(rows_module, name)
        monkeypatch.setattr(
            rows_module, name, lambda *given, name=name, check=check: (checks.append(name), check(*given))
        )
    ids, mask = inv.random_ids(model, 2, 16, 0), torch.ones(2, 16, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, seq_idx=packed(ROWS_OF_DOCUMENTS)["seq_idx"], use_cache=cached)
    assert sorted(checks) == ["check_mask_values", "check_seq_idx"]


@EVERY
def test_rows_are_reordered_with_their_documents(variant):
    model = exact(variant)
    ids, order = inv.random_ids(model, 2, 16, 0), torch.tensor([1, 0, 1])
    inputs = packed(ROWS_OF_DOCUMENTS)
    cache = DynamicCache(config=model.config)
    in_pieces(model, ids[:, :14], {name: tensor[:, :14] for name, tensor in inputs.items()}, [6], cache)
    cache.batch_select_indices(order)
    with torch.no_grad():
        logits = model(ids[order, 14:], past_key_values=cache, seq_idx=inputs["seq_idx"][order, 14:]).logits
    assert_exact(logits, alone(model, ids, ROWS_OF_DOCUMENTS)[order, 14:])


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_generation_goes_on_with_the_last_document(variant, static):
    model = exact(variant)
    ids = inv.random_ids(model, 1, 16, 0)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids[:, 9:], **options)
    if static:
        options |= {"cache_implementation": "static", "disable_compile": True}
    found = model.generate(ids, position_ids=packed([[9, 7]])["position_ids"], **options)
    assert found.sequences[:, -6:].tolist() == expected.sequences[:, -6:].tolist()
    assert_exact(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("variant", FAMILIES)
@compiles
def test_compiled_with_a_cache(variant):
    """The default `use_cache`, and a piece that begins at a border: no value is known while compiling.

    Both pieces have one length: for another, all would be traced once more.
    """
    torch._dynamo.reset()
    model = exact(variant)
    if not variant.startswith("longhorn"):  # each layer is traced; the first has all there is, a state-space model too
        model.config.num_hidden_layers = 1
    ids = inv.random_ids(model, 2, 16, 0)
    expected, positions = alone(model, ids, ROWS_OF_DOCUMENTS), packed(ROWS_OF_DOCUMENTS)["position_ids"]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        first = compiled(ids[:, :8], position_ids=positions[:, :8])
        last = compiled(ids[:, 8:], position_ids=positions[:, 8:], past_key_values=first.past_key_values)
    assert_exact(torch.cat([first.logits, last.logits], 1), expected)


@EVERY_HEAD
@EVERY_ROW
def test_heads_read_packed_rows(row, head):
    model = build_head(row, head).double()
    texts = [ids_of(1, length, seed=length) for length in (5, 1, 7)]
    batches = [
        DataCollatorWithFlattening(**options)([{"input_ids": text[0].tolist()} for text in texts])
        for options in (
            {},
            {"return_position_ids": False, "return_seq_idx": True},
            {"return_position_ids": False, "return_flash_attn_kwargs": True},
            {"return_flash_attn_kwargs": True, "return_seq_idx": True},
        )
    ]
    with torch.no_grad():
        expected = torch.cat([scores(model(text)) for text in texts], 1)
        for batch in batches:
            del batch["labels"]
            assert_exact(scores(model(**batch)), expected)


@pytest.mark.parametrize("row", [row for row in ROWS if "encoder-decoder" not in row])
def test_ends_of_documents_alone(row):
    """`cu_seq_lens_q` without `position_ids`, as a collator for FlashAttention may give it."""
    model = own_language_model(row).double()
    ids = inv.random_ids(model, 1, 16, 0)
    with torch.no_grad():
        logits = model(ids, cu_seq_lens_q=torch.tensor([0, 5, 6, 13, 16], dtype=torch.int32)).logits
    assert_exact(logits, alone(model, ids, ROWS_OF_DOCUMENTS[:1]))


@pytest.mark.parametrize(
    "ends, error, message",
    [
        ([0, 5, 6], TypeError, "cu_seq_lens_q must be an int32 or int64 tensor, got list"),
        (torch.tensor([0.0, 6.0]), TypeError, "got torch.float32"),
        (torch.tensor([[0, 6]]), ValueError, r"shape \(documents \+ 1,\), got \(1, 2\)"),
        (torch.tensor([0, 5]), ValueError, r"rise from 0 to the length 6, got \[0, 5\]"),
        (torch.tensor([0, 4, 3, 6]), ValueError, r"rise from 0 to the length 6, got \[0, 4, 3, 6\]"),
    ],
)
def test_wrong_ends_are_refused(ends, error, message):
    model = language_model("longhorn")
    with pytest.raises(error, match=message):
        model(inv.random_ids(model, 1, 6), cu_seq_lens_q=ends)
    with pytest.raises(ValueError, match="batch of one row, got 2"):
        model(inv.random_ids(model, 2, 6), cu_seq_lens_q=torch.tensor([0, 6]))


def test_unknown_and_contradicting_documents_are_refused():
    model = language_model("longhorn")
    ids, cache = inv.random_ids(model, 1, 6), DynamicCache(config=model.config)
    model(ids, past_key_values=cache, seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match=r"begins with document 0 in row 0, but .* ends with document 1"):
        model(ids, past_key_values=cache, seq_idx=torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="cu_seq_lens_q alone does not say"):
        model(ids, past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 6]))


def test_full_attention_alone_reads_packed_rows_and_refuses_to_go_on():
    """Without a recurrent layer nothing keeps where documents begin."""
    model = full_alone()
    ids, rows = inv.random_ids(model, 2, 16, 0), ROWS_OF_DOCUMENTS
    for by in BY.values():
        inputs = {name: packed(rows)[name] for name in by}
        cache = DynamicCache(config=model.config)
        assert_exact(in_pieces(model, ids, inputs, [], cache), alone(model, ids, rows))
        with pytest.raises(ValueError, match="holds several documents of packed rows"):
            model(ids, past_key_values=cache)
    cache = DynamicCache(config=model.config)
    mask = torch.tensor([[1] * 16, [0] * 3 + [1] * 13])
    model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="holds padding"):
        model(ids[:, :1], past_key_values=cache)
    both = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    with torch.no_grad():
        logits = model(ids[:, :1], attention_mask=both, past_key_values=cache).logits
        text = torch.cat([ids[1:, 3:], ids[1:, :1]], 1)
        assert_exact(logits[1:], inv.whole(model, text)[:, -1:])


@EVERY
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_mask_of_the_current_tokens(variant, side):
    """It goes on where earlier masks ended; a piece without a mask holds no padding."""
    model = exact(variant)
    turns = [[inv.random_ids(model, 1, length, length + 9 * turn) for length in (4, 2, 7)] for turn in range(3)]
    cache = DynamicCache(config=model.config)
    for turn, rows in enumerate(turns):
        ids, mask = inv.pad_rows(rows, 0, side)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        for index, row in enumerate(rows):
            text = torch.cat([past[index] for past in turns[: turn + 1]], 1)
            expected = inv.whole(model, text)[:, -row.shape[1] :]
            assert_exact(logits[index][mask[index].bool()][None], expected)
    token = inv.random_ids(model, 3, 1, 1)
    with torch.no_grad():
        logits = model(token, past_key_values=cache, use_cache=True).logits
    for index in range(3):
        text = torch.cat([*(past[index] for past in turns), token[index : index + 1]], 1)
        assert_exact(logits[index : index + 1], inv.whole(model, text)[:, -1:])


@EVERY
@pytest.mark.parametrize("pad", [slice(0, 3), slice(3, 5), slice(6, 9)], ids=["left", "inside", "right"])
@torch.no_grad()
def test_nan_in_padding_stays_there(variant, pad):
    model = language_model(variant)
    ids, mask = inv.random_ids(model, 2, 9, 0), torch.ones(2, 9, dtype=torch.int64)
    mask[1, pad] = 0
    clean = model.get_input_embeddings()(ids)
    bad = torch.where(mask.bool().unsqueeze(-1), clean, torch.nan)
    results = []
    for embeddings in (clean, bad):
        out = model(inputs_embeds=embeddings, attention_mask=mask, use_cache=True)
        step = model(
            ids[:, :1],
            past_key_values=out.past_key_values,
            attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
        )
        results.append((out.logits[mask.bool()], step.logits))
    for with_nan, without in zip(*results):
        torch.testing.assert_close(with_nan, without)


@torch.no_grad()
def test_nan_in_the_sources_padding_does_not_reach_the_target():
    model, batch = own_language_model("encoder-decoder"), batch_of("encoder-decoder")
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 10:] = 0
    clean = model.get_input_embeddings()(batch["input_ids"])
    inputs = {"attention_mask": mask, "decoder_input_ids": batch["labels"]}
    bad = torch.where(mask.bool().unsqueeze(-1), clean, torch.nan)
    torch.testing.assert_close(model(inputs_embeds=bad, **inputs).logits, model(inputs_embeds=clean, **inputs).logits)


@torch.no_grad()
def test_a_mask_of_the_current_target_tokens():
    """The learned positions of a decoder go on where the cache ends."""
    fields = {**SEQ2SEQ, "decoder_position_embedding_type": "learned"}
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("spade_seq2seq", **TOKENS, **fields)).eval()
    source, target = ids_of(2, 9), ids_of(2, 6, seed=1)
    expected = model(source, decoder_input_ids=target).logits
    out = model(source, decoder_input_ids=target[:, :4], use_cache=True)
    inputs = {"encoder_outputs": (out.encoder_last_hidden_state,), "past_key_values": out.past_key_values}
    mask = torch.ones_like(target[:, 4:])
    logits = model(decoder_input_ids=target[:, 4:], decoder_attention_mask=mask, **inputs).logits
    torch.testing.assert_close(logits, expected[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", [*ROWS, "bst block-recurrent", "bst with memory"])
def test_shapes_on_the_meta_device(row):
    model = own_language_model(row).to("meta")
    batch = {name: tensor.to("meta") for name, tensor in batch_of(row).items()}
    shape = (*batch["labels"].shape, model.config.vocab_size)
    assert model(**batch).logits.shape == shape
    assert model(**batch, attention_mask=torch.ones_like(batch["input_ids"])).logits.shape == shape
    if not model.config.is_encoder_decoder:
        for name in ("position_ids", "seq_idx"):
            out = model(**batch, **{name: batch["input_ids"]}, use_cache=True)
            assert out.logits.shape == shape
            step = model(batch["input_ids"][:, :1], past_key_values=out.past_key_values)
            assert step.logits.shape == (shape[0], 1, shape[2])


@EVERY_ROW
def test_an_empty_batch_is_refused(row):
    model, shape = own_language_model(row), (0, 5)
    decoder = {"decoder_input_ids": ids_of(1, 2)} if model.config.is_encoder_decoder else {}
    with pytest.raises(ValueError, match=r"input_ids must have shape \(batch ≥ 1, length ≥ 1\), got \(0, 5\)"):
        model(torch.zeros(shape, dtype=torch.int64), **decoder)
    with pytest.raises(ValueError, match=r"inputs_embeds must have shape \(batch ≥ 1, length ≥ 1, 24\)"):
        model(inputs_embeds=torch.zeros(*shape, 24), **decoder)
