"""SPADE's language model against the one that its released code builds in fairseq, through the converter."""

import torch

from hf_hybrid_ssm.models.spade.convert_official_checkpoint import convert
from tests.golden.values import FLOAT32, assert_near, golden


def test_language_model(tmp_path):
    """Every key that fairseq writes; adaptive input and softmax, S4, windowed attention; whole and in pieces."""
    wanted = golden("spade_model")
    torch.save({"model": golden("spade_model", "model")}, tmp_path / "checkpoint.pt")
    model = convert(tmp_path / "checkpoint.pt", sliding_window=4).eval().double()
    ids = wanted["input_ids"]
    pieces, cache = [], None
    with torch.no_grad():
        features = model.model(ids).last_hidden_state
        logits = model(ids).logits
        for piece in ids.split([6, 1, 1, 6], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            pieces.append(out.logits)
            cache = out.past_key_values
    assert_near(features, wanted["features"], FLOAT32)
    assert_near(logits, wanted["log_probs"], FLOAT32)
    assert_near(torch.cat(pieces, 1), wanted["log_probs"], FLOAT32)
