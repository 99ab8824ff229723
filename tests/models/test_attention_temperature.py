"""Full attention whose queries grow with their positions, as Llama 4's do."""

import math

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM
from tests.tiny_models import LONGHORN, TOKENS

FULL = {**TOKENS, **LONGHORN, "num_hidden_layers": 2, "block_types": ["full_attention"] * 2}


def model_of(**fields):
    torch.manual_seed(0)
    model = LonghornForCausalLM(LonghornConfig(**FULL | fields)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # weights of attention far from equal
    return model


def ids_of(rows, length):
    return torch.randint(3, TOKENS["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_a_query_grows_by_the_logarithm_of_the_lengths_it_has_passed():
    """Against queries multiplied by hand before transformers' own attention."""

    def attend(module, query, key, value, attention_mask, **options):
        factors = [1 + 0.3 * math.log(1 + (position + 1) // 4) for position in range(query.shape[2])]
        return sdpa_attention_forward(
            module, query * torch.tensor(factors)[:, None], key, value, attention_mask, **options
        )

    AttentionInterface.register("multiplied_by_hand", attend)
    AttentionMaskInterface.register("multiplied_by_hand", sdpa_mask)
    by_hand, model, plain = model_of(), model_of(attn_scale=0.3, floor_scale=4), model_of()
    by_hand.set_attn_implementation("multiplied_by_hand")
    ids = ids_of(2, 21)
    found = model(ids).logits
    torch.testing.assert_close(found, by_hand(ids).logits)
    unchanged = plain(ids).logits
    assert found[:, :3].equal(unchanged[:, :3])  # (p + 1) // 4 is 0
    assert (found[:, 3:] - unchanged[:, 3:]).abs().amax(-1).min() > 1e-4


@torch.no_grad()
def test_positions_count_in_each_document_and_without_padding():
    model, ids = model_of(attn_scale=0.3, floor_scale=4), ids_of(1, 20)
    documents = (torch.arange(20) >= 9).long()[None]
    alone = [model(ids[:, :9]).logits, model(ids[:, 9:]).logits]
    torch.testing.assert_close(model(ids, seq_idx=documents).logits, torch.cat(alone, 1))
    padded = torch.nn.functional.pad(ids, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 0))
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 5:], model(ids).logits)
    pieces, cache = [], None
    for piece in ids.split([6, 1, 1, 12], dim=1):
        output = model(piece, cache=cache, use_cache=True)
        cache = output.cache
        pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids).logits)


def test_the_scale_follows_the_window_until_it_is_named():
    assert LonghornConfig(**FULL, attn_scale=0.1, sliding_window=8).floor_scale == 9
    assert LonghornConfig(**FULL, attn_scale=0.1, floor_scale=5).floor_scale == 5
    assert LonghornConfig(**FULL).floor_scale is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_scale": -0.1}, "attn_scale=-0.1 must be at least 0"),
        ({"attn_scale": 0.1, "floor_scale": 0}, "floor_scale=0 must be positive"),
        ({"floor_scale": 4}, "attn_scale=0.0 with floor_scale=4"),
        ({"attn_scale": 0.1, "sliding_window": None}, "floor_scale=None"),
        ({"attn_scale": 0.1, "block_types": ["sliding_attention"] * 2}, "attn_scale=0.1 is of full attention"),
    ],
)
def test_misuse_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        LonghornConfig(**FULL | fields)
