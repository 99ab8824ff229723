"""GSS-Hybrid and MEGA-chunk are their papers' equations, one token at a time in float64, with gradients, and train."""

import pytest
import torch
from _lib import paper_baselines  # noqa: F401 - registers both
from torch.nn.functional import gelu, silu, softmax
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

SIZES = {
    "vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 20, "sliding_window": 4, "tie_word_embeddings": True,
}  # fmt: skip
OWN = {
    "gss_hybrid": {"state_size": 6, "state_space_width": 5, "gate_width": 18},
    "mega_chunk": {"state_size": 3, "head_dim": 4, "value_width": 14, "chunk_size": 4},
}


def small(model_type, **given):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | OWN[model_type] | given)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.ndim < 3 and "state_space" not in name and "average." not in name:
            weight.data.normal_(std=0.4)  # also those that start at 0 or 1
    return model.double().eval()


def linear(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def normed(norm, x):
    return norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def gated_state_space(layer, x, positions):
    state, read, xs = None, [], normed(layer.norm, x)
    for t in range(x.shape[1]):
        u = normed(layer.state_space_norm, gelu(linear(layer.in_proj, xs[:, t : t + 1])))
        y, state = layer.state_space(u, state, return_state=True)
        read.append(y)
    gate = gelu(linear(layer.gate_proj, xs))
    return x + linear(layer.out_proj, gate * linear(layer.state_proj, torch.cat(read, 1)))


def mega(layer, x, positions):
    attention, xs = layer.attention, normed(layer.attention_norm, x)
    ema = attention.average
    p, a = ema.delta[0].sigmoid(), ema.alpha[0].sigmoid()
    h, averages = torch.zeros_like(p).expand(len(x), -1, -1), []
    for t in range(x.shape[1]):
        h = (1 - p * a) * h + p * ema.beta[0] * xs[:, t, :, None]
        averages.append(silu((ema.gamma[0] * h).sum(-1) / p.shape[-1] ** 0.5 + ema.omega * xs[:, t]))
    update, z, reset, state = linear(attention.average_proj, torch.stack(averages, 1)).split([12, 4, 14, 12], -1)
    q, k = (silu(z) * attention.scale[i] + attention.shift[i] for i in (0, 1))
    cos, sin = positions
    q, k = (part * cos + torch.cat([-part[..., 2:], part[..., :2]], -1) * sin for part in (q, k))
    v = silu(linear(attention.value_proj, xs))
    rows = []
    for t in range(x.shape[1]):
        seen = slice(t // 4 * 4, t + 1)
        weights = softmax((k[:, seen] @ q[:, t, :, None]).squeeze(-1) / 2, -1)
        rows.append((weights[..., None] * v[:, seen]).sum(1))
    h = silu(state + linear(attention.out_proj, silu(reset) * torch.stack(rows, 1)))
    x = x + update.sigmoid() * (h - x)
    inner, _, outer = layer.feed_forward
    return x + linear(outer, silu(linear(inner, normed(layer.feed_forward_norm, x))))


@pytest.mark.parametrize(("model_type", "equations"), [("gss_hybrid", gated_state_space), ("mega_chunk", mega)])
def test_a_layer_is_its_equations_with_gradients(model_type, equations):
    model = small(model_type)
    layer, x = model.model.layers[2], torch.randn(2, 11, 12, dtype=torch.float64)
    positions = model.model.rotary_emb(x, torch.arange(11)[None])
    direction = torch.randn_like(x)
    found = layer(x, position_embeddings=positions)
    gradients = torch.autograd.grad((found * direction).sum(), list(layer.parameters()))
    wanted = equations(layer, x, positions)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # filters of S4D are made in float32
    exact = torch.autograd.grad((wanted * direction).sum(), list(layer.parameters()))
    for (name, _), one, other in zip(layer.named_parameters(), gradients, exact):
        assert (one - other).norm() <= 1e-5 * other.norm(), name


@pytest.mark.parametrize("model_type", OWN)
def test_no_token_reads_ahead_and_every_weight_learns(model_type):
    model, tokens = small(model_type), torch.randint(0, 50, (2, 11))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert loss.isfinite() and all(weight.grad.abs().sum() > 0 for weight in model.parameters())
    changed = tokens.clone()
    changed[:, 6] += 1 - 2 * (changed[:, 6] > 24)
    differs = (model(tokens).logits != model(changed).logits).any(-1).any(0).tolist()
    assert not any(differs[:6]) and all(differs[6:])
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as recipes train with bf16=true
        assert abs(model.float()(input_ids=tokens, labels=tokens).loss - loss) < 0.1
    hidden = {"attention_mask": torch.tensor([[0] + [1] * 10] * 2)}
    for wrong in ({"use_cache": True}, {"output_hidden_states": True}, hidden):
        with pytest.raises(ValueError, match=f"{model_type}.*{next(iter(wrong))}"):
            model(tokens, **wrong)


@pytest.mark.parametrize("model_type", OWN)
def test_a_trainer_trains_it(model_type, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (4, 9))]
    options = {"max_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    trainer = Trainer(small(model_type).float(), TrainingArguments(tmp_path, **options), train_dataset=rows)
    assert trainer.train().training_loss > 0
    assert type(trainer.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # smoothed labels are shifted


def test_every_fourth_layer_of_gss_hybrid_is_attention():
    layers = small("gss_hybrid", num_hidden_layers=7).model.layers
    assert [isinstance(layer, MistralDecoderLayer) for layer in layers] == [n in (1, 5) for n in range(7)]
