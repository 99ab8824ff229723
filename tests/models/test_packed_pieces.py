"""Packed rows: each document is what it is alone: at once, in pieces, in every head, compiled, after a rollback."""

from itertools import pairwise

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
)

from hf_hybrid_ssm.models.columns import with_columns
from hf_hybrid_ssm.models.packing import resolve_packing
from hf_hybrid_ssm.ops.core import rows as rows_module
from tests.models import invariances as inv
from tests.models.test_span_and_token_heads import EVERY_HEAD, EVERY_ROW, scores
from tests.models.test_span_and_token_heads import build as build_head
from tests.tiny_models import (
    ROWS,
    TOKENS,
    VARIANTS,
    batch_of,
    compiles,
    ids_of,
    language_model,
    own_language_model,
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


def test_the_first_tokens_of_padded_rows():
    """What a rollback sees: a row that has only read padding has not begun its next document."""
    held = 3, {"document": torch.tensor([1, 1]), "start": torch.tensor([0, 0])}
    given = {"seq_idx": torch.ones(2, 4, dtype=torch.int64), "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4])}
    rows = with_columns(resolve_packing((2, 4), held, **given), None, needs_starts=True, keeps_padding=False)
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
