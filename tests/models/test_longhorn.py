"""The Longhorn family against golden numbers, its invariances, and its refusals."""

import math

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    DynamicCache,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM, LonghornForSequenceClassification, LonghornModel
from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornMixer
from tests.models import invariances as inv

TINY = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 5, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HYBRID = {
    **TINY, "layer_types": ["longhorn", "window_attention", "full_attention"], "sliding_window": 6,
    "num_key_value_heads": 2, "mlp_intermediate_size": 40,
}  # fmt: skip


def build(config: dict, seed: int = 0) -> LonghornForCausalLM:
    torch.manual_seed(seed)
    model = LonghornForCausalLM(LonghornConfig(**config)).eval()
    for parameter in model.parameters():  # away from the smooth initial point, so that a mistake shows
        parameter.data.mul_(2.0)
    return model


@pytest.fixture(scope="module", params=[TINY, HYBRID], ids=["pure", "hybrid"])
def model(request):
    return build(request.param)


# Golden numbers: tensor number p is filled with 0.3 sin(p + 0.7 m), plus one for D and the norms.


def fill(tensor: torch.Tensor, number: int, plus: float = 0.0) -> None:
    index = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
    tensor.data = plus + 0.3 * torch.sin(number + 0.7 * index)


def fill_mixer(mixer: LonghornMixer, layer: int) -> None:
    tensors = (
        mixer.in_proj.weight, mixer.conv1d.weight, mixer.conv1d.bias, mixer.x_proj.weight, mixer.dt_proj.weight,
        mixer.dt_bias, mixer.D, mixer.out_proj.weight,
    )  # fmt: skip
    for number, tensor in enumerate(tensors, start=10 * layer + 1):
        fill(tensor, number, plus=1.0 if tensor is mixer.D else 0.0)


GOLDEN = LonghornConfig(
    vocab_size=7,
    hidden_size=4,
    num_hidden_layers=2,
    state_size=3,
    time_step_rank=1,
    bos_token_id=None,
    eos_token_id=None,
)
GOLDEN_OUTPUT = torch.tensor(
    [
        [-0.003392963847, -0.003354912762, -0.001810947879, 0.000545893996],
        [0.002450880718, 0.002439080255, 0.001332454123, -0.000372268350],
        [0.005344639356, 0.003094884112, -0.000544066325, -0.003938802668],
        [0.010778258399, 0.002952164641, -0.006199062073, -0.012567726686],
        [0.016146792090, 0.003185687673, -0.011205370773, -0.020566694128],
    ],
    dtype=torch.float64,
)


def test_golden_mixer():
    mixer = LonghornMixer(GOLDEN, 0)
    fill_mixer(mixer, 0)
    t, j = torch.arange(5, dtype=torch.float64)[:, None], torch.arange(4, dtype=torch.float64)
    u = torch.cos(0.5 * t + j)[None]
    cache = DynamicCache(config=GOLDEN)
    output = mixer(u, cache=cache)
    torch.testing.assert_close(output[0], GOLDEN_OUTPUT, rtol=0, atol=1e-11)
    state = cache.layers[0].states["scan"][0, :2]
    expected = [[0.021073079474, 0.031192499146, 0.027751246788], [-0.020417665528, -0.026238078859, -0.020845947010]]
    torch.testing.assert_close(state, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-11)
    mixer.x_proj.weight.data[1:] *= 10
    strong = torch.tensor([-0.002684332179, -0.000612580038, 0.001734139828, 0.003302459397], dtype=torch.float64)
    torch.testing.assert_close(mixer(u)[0, -1], strong, rtol=0, atol=1e-11)


def test_golden_model():
    model = LonghornForCausalLM(GOLDEN).double().eval()
    fill(model.model.embed_tokens.weight, 20)
    model.tie_weights()
    fill(model.model.norm.weight, 40, plus=1.0)
    for index, layer in enumerate(model.model.layers):
        fill(layer.norm.weight, 30 + index, plus=1.0)
        fill_mixer(layer.mixer, index)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    output = model(ids, labels=ids)
    expected = [
        0.062651889532, 0.167835865971, -0.378929294500, 0.546235427651, -0.650421151896, 0.679447252668,
        -0.629959609644,
    ]  # fmt: skip
    torch.testing.assert_close(output.logits[0, -1], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)
    assert output.loss.item() == pytest.approx(2.144116981968912, abs=1e-6)


@pytest.mark.parametrize(
    ("preset", "overrides", "count"),
    [
        ("125m", {}, 128_563_968),
        ("350m", {}, 369_968_128),
        ("1.3b", {}, 1_331_595_264),
        ("1.3b", {"vocab_size": 50304}, 1_369_081_856),
    ],
)
def test_parameter_counts(preset, overrides, count):
    with torch.device("meta"):
        model = LonghornForCausalLM(LonghornConfig.preset(preset, **overrides))
    assert sum(p.numel() for p in model.parameters()) == count


def test_initial_distributions():
    torch.manual_seed(0)
    config = LonghornConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=4)
    model = LonghornForCausalLM(config)
    mixer = model.model.layers[1].mixer

    def assert_uniform(tensor, bound):
        assert tensor.abs().max() <= bound
        assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)

    assert_uniform(mixer.in_proj.weight, 1 / math.sqrt(64))
    assert_uniform(mixer.conv1d.weight, 0.5)
    assert_uniform(mixer.conv1d.bias, 0.5)
    assert_uniform(mixer.x_proj.weight, 1 / math.sqrt(128))
    assert_uniform(mixer.dt_proj.weight, 1 / math.sqrt(4))
    assert_uniform(mixer.out_proj.weight, 1 / math.sqrt(128) / math.sqrt(4))
    assert (mixer.dt_bias == 0).all()
    assert (mixer.D == 1).all()
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.lm_head.weight is model.model.embed_tokens.weight


# Saving, loading, dtypes


def test_recurrence_stays_float32_in_bfloat16(tmp_path):
    model = build(TINY)
    model.save_pretrained(tmp_path)
    loaded = LonghornForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    mixer = loaded.model.layers[0].mixer
    assert mixer.in_proj.weight.dtype == torch.bfloat16
    for name in ("D", "dt_bias"):
        assert getattr(mixer, name).dtype == torch.float32
        assert torch.equal(getattr(mixer, name), getattr(model.model.layers[0].mixer, name))
    ids = inv.random_ids(model, 2, 9)
    output = loaded(ids, use_cache=True)
    assert output.past_key_values.layers[0].states["scan"].dtype == torch.float32
    torch.testing.assert_close(output.logits.float(), inv.whole(model, ids), rtol=0.1, atol=0.15)


def test_auto_classes(tmp_path):
    config = AutoConfig.for_model("longhorn", **TINY)
    assert type(config) is LonghornConfig
    assert type(AutoModel.from_config(config)) is LonghornModel
    assert type(AutoModelForSequenceClassification.from_config(config)) is LonghornForSequenceClassification
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    loaded.name_or_path = config.name_or_path
    assert loaded.to_dict() == config.to_dict()


# Training


def test_loss_without_logits_equals_loss_with():
    model = build(TINY).train()
    ids = inv.random_ids(model, 3, 11)
    labels = ids.masked_fill(ids % 5 == 0, -100)
    plain = model(ids, labels=labels)
    plain.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.config.use_linear_cross_entropy = True
    chunked = model(ids, labels=labels)
    chunked.loss.backward()
    assert chunked.logits is None
    torch.testing.assert_close(chunked.loss, plain.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_labels_that_are_shifted_already_are_not_shifted_again(fused):
    """As sequence parallelism gives them, whose pieces end before the token that they predict last."""
    model = build(TINY | {"use_linear_cross_entropy": fused}).train()
    ids = inv.random_ids(model, 3, 11)
    shifted = ids.flip(1)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), shifted.flatten())
        torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_classifier_pools_the_last_real_token(side):
    torch.manual_seed(0)
    model = LonghornForSequenceClassification(LonghornConfig(**TINY, num_labels=4)).eval()
    rows = [torch.randint(0, 61, (1, length)) for length in (3, 7, 5)]  # token 0 may be text: the mask decides
    ids, mask = inv.pad_rows(rows, 0, side)
    with torch.no_grad():
        batch = model(ids, attention_mask=mask).logits
        alone = torch.cat([model(row, attention_mask=torch.ones_like(row)).logits for row in rows])
    torch.testing.assert_close(batch, alone, rtol=1e-5, atol=1e-6)


# Bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"state_size": -1}, "state_size=-1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"conv_kernel": 0}, "conv_kernel=0"),
        ({"time_step_rank": "large"}, "time_step_rank='large'"),
        ({"layer_types": ["full_attention"] * 3, "num_attention_heads": 5, "num_key_value_heads": 2}, "multiple"),
        ({"layer_types": ["longhorn"]}, "names 1 layers"),
        ({"layer_types": ["mamba"] * 3}, "mamba"),
        ({"layer_types": ["window_attention"] * 3, "sliding_window": None}, "sliding_window=None"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        LonghornConfig(**{**TINY, **fields})


def test_unknown_preset():
    with pytest.raises(ValueError, match="125m"):
        LonghornConfig.preset("125b")


def test_bad_inputs(model):
    """Beside those of tests/reliability/test_misuse_of_models.py."""
    ids = inv.random_ids(model, 2, 5)
    with pytest.raises(ValueError, match="exactly one"):
        model(ids, inputs_embeds=torch.zeros(2, 5, 24))
    with pytest.raises(ValueError, match="length"):
        model(ids[:, :0])
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(2, 5, 7))
    for documents in (torch.tensor([[1, 0, 0, 0, 0]] * 2), torch.zeros(2, 4, dtype=torch.int32)):
        with pytest.raises(ValueError, match="seq_idx"):
            model(ids, seq_idx=documents)


def test_foreign_caches(model):
    ids = inv.random_ids(model, 2, 5)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="batch of 2"):
        model(ids[:1], past_key_values=cache)
    other = LonghornConfig(**{**TINY, "num_hidden_layers": 2})
    with pytest.raises(ValueError, match="3 layers"):
        model(ids, past_key_values=DynamicCache(config=other))
    with pytest.raises(TypeError, match="Cache"):
        model(ids, past_key_values=((ids, ids),))


def test_cache_made_without_config(model):
    ids = inv.random_ids(model, 2, 7)
    inv.check_split(model, ids, [3], cache=DynamicCache())


def test_crop_beyond_the_record(model):
    ids = inv.random_ids(model, 1, 6)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="recorded past"):
        cache.layers[0].crop(-7)


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
