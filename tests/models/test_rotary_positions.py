"""Every kind of rotary positions that transformers knows: a text has one reading, with a cache and padded."""

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.tiny_models import EVERY, STUDENTS, build, config_of

KINDS = ("default", *ROPE_INIT_FUNCTIONS)
BOUND = 16  # of the frequencies; texts are longer
FIELDS = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}
ROTARY = ["longhorn + full attention", "longhorn + window and full attention"]
ROTARY += ["student: windows and a full layer", "student: groups", "student: first tokens", "student with a mixer"]


def rope_of(kind: str, head_dim: int) -> dict:
    pairs = {"short_factor": [1.0] * (head_dim // 2), "long_factor": [2.0] * (head_dim // 2)}
    return {
        "rope_type": kind,
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": BOUND,
        **FIELDS.get(kind, {}),
        **(pairs if kind == "longrope" else {}),
    }


def with_rope(variant: str, kind: str) -> dict:
    rope = rope_of(kind, config_of(variant).head_dim)
    return {"rope_parameters": rope, "max_position_embeddings": 4 * BOUND}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ROTARY)
@torch.inference_mode()
def test_a_text_has_one_reading(variant, kind, monkeypatch):
    family, own = EVERY[variant]
    fields = {**own, **with_rope(variant, kind)}
    monkeypatch.setitem(EVERY, variant, (family, fields))
    if kind in ("dynamic", "longrope"):
        words = "turns keys by the length" if family == STUDENTS else "chooses its frequencies by the length.*'yarn'"
        with pytest.raises(ValueError, match=f"rope_type='{kind}' {words}"):
            build(variant)
        return
    model = build(variant)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and ".ssm." not in name:
            parameter.mul_(3.0)
    assert model.model.rotary_emb.rope_type == kind
    ids = torch.randint(3, 61, (2, 2 * BOUND), generator=torch.Generator().manual_seed(0))
    whole, cache = model(ids).logits, DynamicCache(config=model.config)
    begins, ends = (0, BOUND - 2, BOUND - 1, BOUND, BOUND + 1), (BOUND - 2, BOUND - 1, BOUND, BOUND + 1, 2 * BOUND)
    pieces = [model(ids[:, begin:end], past_key_values=cache).logits for begin, end in zip(begins, ends)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=2e-5)
    short = ids[:, : BOUND - 2]
    padded, mask = (torch.nn.functional.pad(x, (BOUND, 0)) for x in (short, torch.ones_like(short)))
    beside = torch.cat([padded, torch.cat([ids, ids], 1)[:, : padded.shape[1]]])
    masks = torch.cat([mask, torch.ones_like(mask)])
    found = model(beside, attention_mask=masks).logits[:2, BOUND:]
    torch.testing.assert_close(found, model(short).logits, rtol=1e-4, atol=2e-5)
