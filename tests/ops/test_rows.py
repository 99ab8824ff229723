"""`Rows`: made and checked once, the same for every op."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Documents, Padding, Rows, checked_rows

SEQ_IDX = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]])


def test_the_default_says_nothing():
    assert checked_rows(PLAIN_ROWS, 2, 4) == (None, None)
    assert PLAIN_ROWS.lengths is None and PLAIN_ROWS.seq_idx is None and not PLAIN_ROWS.return_final_state


@pytest.mark.parametrize("mask", [[[0, 1, 0, 1, 1], [1, 1, 1, 1, 0]], [[0] * 5, [1] * 5]])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_of_a_mask(mask, dtype):
    mask = torch.tensor(mask).to(dtype)
    padding, x = Padding.from_mask(mask), torch.randn(2, 5, 3)
    assert padding.lengths.tolist() == mask.sum(1).tolist()
    torch.testing.assert_close(padding.repad(padding.unpad(x)), x, rtol=0, atol=0)
    for row in range(2):
        real = x[row][mask[row] != 0]
        torch.testing.assert_close(padding.unpad(x)[row, : len(real)], real, rtol=0, atol=0)


def test_a_mask_that_hides_nothing_is_no_padding():
    assert Padding.from_mask(torch.ones(2, 3)) is None
    with pytest.raises(ValueError, match="the_mask must be 1 for text and 0 for padding, got values from 0"):
        Padding.from_mask(torch.tensor([[0.0, 2.0]]), "the_mask")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": [1, 2]}, TypeError, r"lengths must be a tensor of shape \(B\), got list"),
        ({"lengths": torch.tensor([1.0, 2.0])}, TypeError, "lengths must be int32 or int64"),
        ({"lengths": torch.tensor([[1, 2]])}, ValueError, r"lengths must have shape \(B\)"),
        ({"lengths": torch.tensor([-1, 2])}, ValueError, r"lengths must lie in 0..L, .* got \[-1, 2\]"),
        ({"seq_idx": [[0, 1]]}, TypeError, r"seq_idx must be a tensor of shape \(B, L\), got list"),
        ({"seq_idx": torch.tensor([[1, 0]])}, ValueError, "seq_idx must not decrease"),
        ({"seq_idx": torch.tensor([0, 1])}, ValueError, r"seq_idx must have shape \(B, L\)"),
    ],
)
def test_of_bad_tensors(options, error, message):
    with pytest.raises(error, match=message):
        Rows.of(**options)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ({"lengths": None}, TypeError, "rows must be a Rows, as Rows.of makes it, got dict"),
        (Rows.of(lengths=torch.tensor([1, 5])), ValueError, r"lengths must lie in 0..4, .* got \[1, 5\]"),
        (Rows.of(lengths=torch.tensor([1])), ValueError, r"lengths must have shape \(B\) = \(2\), got \(1,\)"),
        (Rows.of(seq_idx=SEQ_IDX[:, :3]), ValueError, r"seq_idx must have shape \(B, L\) = \(2, 4\), got \(2, 3\)"),
    ],
)
def test_rows_of_another_input(rows, error, message):
    with pytest.raises(error, match=message):
        checked_rows(rows, 2, 4)


def test_documents_of_inputs():
    lengths = torch.tensor([0, 2, 3, 4])
    given = {"seq_idx": None, "cu_seq_lens_q": lengths, "restarts": None, "padding": None}
    documents = Documents.from_inputs(1, 4, **given)
    assert documents.seq_idx.tolist() == [[0, 0, 1, 2]] and documents.count == 3 and not documents.is_numbered
    padding = Padding.from_mask(torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1]]))
    documents = Documents.from_inputs(2, 4, **given | {"seq_idx": SEQ_IDX, "padding": padding})
    assert documents.seq_idx.tolist() == [[0, 1, 1, 1], [0, 1, 2, 2]]  # in the order of unpadded rows
    assert documents.of_columns.tolist() == [[0, 0, 1, 1], [0, 0, 1, 2]]
    assert documents.is_numbered and documents.max_documents() == documents.counted().count == 3
    assert Documents.from_inputs(2, 4, **given | {"cu_seq_lens_q": None}) is None


def test_rows_are_frozen_and_move_as_a_whole():
    rows = Rows.of(lengths=torch.tensor([4, 2]), seq_idx=SEQ_IDX, return_final_state=True)
    with pytest.raises(FrozenInstanceError):
        rows.return_final_state = False
    moved = rows.to("meta")
    assert moved.lengths.is_meta and moved.seq_idx.is_meta and moved.return_final_state
    assert not rows.lengths.is_meta and not rows.seq_idx.is_meta
