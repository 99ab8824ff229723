"""The Longhorn family against golden numbers, its invariances, and its refusals."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM
from tests import tiny_models as tiny
from tests.models import invariances as inv

TINY = tiny.TOKENS | tiny.LONGHORN
HYBRID = TINY | tiny.HYBRID


def build(config: dict, seed: int = 0) -> LonghornForCausalLM:
    torch.manual_seed(seed)
    model = LonghornForCausalLM(LonghornConfig(**config)).eval()
    for parameter in model.parameters():  # away from the smooth initial point, so that a mistake shows
        parameter.data.mul_(2.0)
    return model


@pytest.fixture(scope="module", params=[TINY, HYBRID], ids=["pure", "hybrid"])
def model(request):
    return build(request.param)


@pytest.mark.parametrize(("preset", "percent"), [("125m", 0.46), ("350m", 0.42), ("1.3b", 0.24)])
def test_parameters_beside_a_mamba_of_the_same_sizes(preset, percent):
    """Its forgetting is said by its keys, so that it has no matrix A: what docs/experiments.md says of it."""
    ours = LonghornConfig.preset(preset)
    names = ("hidden_size", "num_hidden_layers", "state_size", "vocab_size", "tie_word_embeddings")
    theirs = AutoConfig.for_model("mamba", **{name: getattr(ours, name) for name in names}, pad_token_id=0)
    with torch.device("meta"):
        counts = [AutoModelForCausalLM.from_config(config).num_parameters() for config in (ours, theirs)]
    assert 100 * (1 - counts[0] / counts[1]) == pytest.approx(percent, abs=0.005)


# Training


@pytest.mark.parametrize("fused", [False, True])
def test_labels_that_are_shifted_already_are_not_shifted_again(fused):
    """As sequence parallelism gives them, whose pieces end before the token that they predict last."""
    model = build(TINY | {"use_linear_cross_entropy": fused}).train()
    ids = inv.random_ids(model, 3, 11)
    shifted = ids.flip(1)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), shifted.flatten())
        torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, expected)


def test_cache_made_without_config(model):
    ids = inv.random_ids(model, 2, 7)
    inv.check_split(model, ids, [3], cache=DynamicCache())


def test_a_reset_forgets_the_recorded_past():
    model = build(TINY)
    ids, cache = inv.random_ids(model, 1, 6), DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(ids, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = model(ids[:, :2], past_key_values=cache).logits
    assert torch.equal(again, model(ids[:, :2]).logits)
    with pytest.raises(ValueError, match="1 tokens beyond the recorded past"):
        cache.layers[0].crop(-3)
    cache.crop(-2)
    assert torch.equal(again, model(ids[:, :2], past_key_values=cache).logits)


def test_a_static_cache_says_that_it_cannot_go_back(model):
    ids = inv.random_ids(model, 1, 6)
    cache = StaticCache(config=model.config, max_cache_len=10)
    model(ids, past_key_values=cache)
    with pytest.raises(RuntimeError, match="static cache cannot go back"):
        cache.crop(-1)


def window_as_flash_attention(module, queries, keys, values, mask, *, dropout, scaling, sliding_window):
    """What transformers' flash-attention takes and returns, by its equation."""
    assert mask is None and dropout == 0.0
    shared, distance = queries.shape[1] // keys.shape[1], torch.arange(queries.shape[2])
    distance = distance.unsqueeze(1) - distance
    logits = scaling * queries @ keys.repeat_interleave(shared, 1).mT
    logits = logits.masked_fill((distance < 0) | (distance >= sliding_window), -torch.inf)
    return (logits.softmax(-1) @ values.repeat_interleave(shared, 1)).transpose(1, 2), None


@pytest.mark.parametrize("with_mask", [False, True])
def test_flash_attention_runs_windows_from_their_start(monkeypatch, with_mask):
    """A row's first forward, padded or not; the steps after it go on from the same states."""
    model = build({**HYBRID, "layer_types": ["longhorn", "window_attention", "window_attention"]}).double()
    ids = torch.randint(3, 61, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    inputs = {"attention_mask": mask} if with_mask else {}
    expected, calls = model(ids, **inputs).logits, []

    def flash(*arguments, **options):
        calls.append(arguments[0].layer_idx)
        return window_as_flash_attention(*arguments, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    model.config._attn_implementation = "flash_attention_2"
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :15], past_key_values=cache, **{name: given[:, :15] for name, given in inputs.items()}).logits
    assert calls == [1, 2]
    rest = model(ids[:, 15:], past_key_values=cache, **inputs).logits
    packed = model(ids, seq_idx=torch.zeros_like(ids)).logits
    assert calls == [1, 2]
    real = mask.bool() if with_mask else torch.ones_like(mask).bool()
    torch.testing.assert_close(torch.cat([first, rest], 1)[real], expected[real], rtol=1e-9, atol=1e-11)
    if not with_mask:
        torch.testing.assert_close(packed, expected, rtol=1e-9, atol=1e-11)


def test_an_attention_of_ones_own_needs_a_mask_function():
    """transformers gives it no mask otherwise, and padding and other documents would be read."""
    model, ids = build(HYBRID), torch.randint(3, 61, (1, 20))
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    expected = model(ids, attention_mask=mask).logits[:, 7:]
    AttentionInterface.register("own", sdpa_attention_forward)
    model.set_attn_implementation("own")
    with pytest.raises(ValueError, match="attn_implementation='own' has no mask function"):
        model(ids, attention_mask=mask)
    AttentionMaskInterface.register("own", sdpa_mask)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 7:], expected)
