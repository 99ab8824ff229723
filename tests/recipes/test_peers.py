"""Peers: Mamba's scan in C is its equation, the model is transformers' Mamba, a Llama gains a convolution; and those
that papers compare with can be trained."""

import finetune_glue
import finetune_summarization
import pretrain_clm
import pretrain_seq2seq
import pytest
import torch
from _lib.documents import train_tokenizer
from _lib.peers import selective_scan
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hf_hybrid_ssm.ops.core.native_library import missing_compiler

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
MAMBA = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5}


def scan_step_by_step(u, delta, a, b, c):
    """h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t, y_t = C_t h_t."""
    h, out = u.new_zeros(*u.shape[::2], a.shape[1]), []
    for t in range(u.shape[1]):
        dt = delta[:, t, :, None]
        h = torch.exp(dt * a) * h + dt * b[:, t, None] * u[:, t, :, None]
        out.append((h * c[:, t, None]).sum(-1))
    return torch.stack(out, 1)


@needs_compiler
@pytest.mark.parametrize(("batch", "length", "channels", "states"), [(2, 37, 16, 16), (1, 1, 35, 2), (3, 64, 40, 5)])
def test_the_scan_is_the_equation_with_its_gradients(batch, length, channels, states):
    torch.manual_seed(0)
    shapes = [(batch, length, channels)] * 2 + [(channels, states)] + [(batch, length, states)] * 2
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[1], inputs[2] = inputs[1].exp() * 0.1, -inputs[2].exp()
    given = [part.clone().requires_grad_() for part in inputs]
    exact = [part.double().requires_grad_() for part in inputs]
    y, wanted = selective_scan(*given), scan_step_by_step(*exact)
    assert (y - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    direction = torch.randn(y.shape)
    (y * direction).sum().backward()
    (wanted * direction).sum().backward()
    for found, reference in zip(given, exact):
        # 2.3e-7 where torch sums without AVX: two units in the last place of float32
        assert (found.grad - reference.grad).norm() <= 2.4e-7 * reference.grad.norm()


@needs_compiler
def test_native_mamba_is_transformers_mamba_weight_for_weight():
    torch.manual_seed(0)
    theirs = MambaForCausalLM(MambaConfig(**MAMBA)).eval()
    ours = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba_native", **MAMBA)).eval()
    assert {name: value.shape for name, value in ours.state_dict().items()} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    tokens = torch.randint(0, 50, (2, 33))
    for training in (False, True):
        losses = [model.train(training)(tokens, labels=tokens, use_cache=False) for model in (theirs, ours)]
        torch.testing.assert_close(losses[1].logits, losses[0].logits, rtol=1e-5, atol=1e-6)
    for model, found in zip((theirs, ours), losses):
        model.zero_grad()
        found.loss.backward()
    for (name, one), other in zip(theirs.named_parameters(), ours.parameters()):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)


@needs_compiler
def test_native_mamba_begins_as_transformers_mamba_does():
    models = []
    for name in ("mamba", "mamba_native"):
        torch.manual_seed(3)
        models.append(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MAMBA)))
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(other, one, rtol=0, atol=0, msg=name)


def test_native_mamba_begins_as_in_mambas_own_code_if_asked():
    """Its `_init_weights` leaves torch's projections and convolutions but for `out_proj`, which depth divides; step
    sizes, A and D are transformers' too."""
    width, layers = 96, 4
    sizes = {"vocab_size": 500, "hidden_size": width, "num_hidden_layers": layers, "state_size": 16}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mamba_native", official_initialization=True, **sizes)
    )
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))
    assert model.backbone.embeddings.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.lm_head.weight is model.backbone.embeddings.weight
    inner = 2 * width
    bounds = {
        "in_proj.weight": width**-0.5, "x_proj.weight": inner**-0.5, "out_proj.weight": (inner * layers) ** -0.5,
        "conv1d.weight": 0.5, "conv1d.bias": 0.5,
    }  # fmt: skip
    for layer, other in zip(model.backbone.layers, theirs.backbone.layers):
        for name, bound in bounds.items():
            value = layer.mixer.get_parameter(name)
            assert 0.95 * bound < value.abs().max() <= bound, name
            assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.1), name
        for name in ("A_log", "D"):
            torch.testing.assert_close(layer.mixer.get_parameter(name), other.mixer.get_parameter(name))
        steps = torch.nn.functional.softplus(layer.mixer.dt_proj.bias)
        assert 1e-3 * 0.999 <= steps.min() < steps.max() <= 0.1 * 1.001


def test_convolved_llama_sees_the_tokens_before_through_its_convolution():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama_conv", num_attention_heads=2, **sizes)).eval()
    attention = model.model.layers[0].self_attn
    assert tuple(attention.short_conv.weight.shape) == (16, 1, 4)
    read = []
    attention.q_proj.register_forward_pre_hook(lambda module, given: read.append(given[0].detach()))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    model(tokens, labels=tokens).loss.backward()
    assert attention.short_conv.weight.grad.abs().sum() > 0
    changed = tokens.clone()
    changed[0, 1] = 9
    model(changed)
    differs = (read[0] != read[1]).any(-1)[0].tolist()
    assert differs == [False, True, True, True, True, False, False]  # four taps, none ahead
    for wrong in ({"use_cache": True}, {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]])}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model(tokens, **wrong)


def test_an_lstm_is_its_equations():
    """Gates i, f, g, o of W x + U h + b; c' = f c + i g, h' = o tanh(c'); logits by the embeddings."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("lstm_lm", vocab_size=30, hidden_size=12, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    assert model.num_parameters() - 30 * 12 == 2 * (8 * 12 * 12 + 8 * 12)  # the head is the embeddings
    tokens = torch.randint(0, 30, (2, 9))
    x = model.embed_tokens(tokens)
    for layer in range(2):
        w, u, b, bias = (
            getattr(model.lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h = c = x.new_zeros(2, 12)
        outputs = []
        for t in range(9):
            i, f, g, o = (x[:, t] @ w.T + h @ u.T + b + bias).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        x = torch.stack(outputs, 1)
    wanted = x @ model.embed_tokens.weight.T
    found = model(tokens, labels=tokens)
    torch.testing.assert_close(found.logits, wanted)
    loss = torch.nn.functional.cross_entropy(wanted[:, :-1].reshape(-1, 30), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(found.loss, loss.float())


@pytest.mark.parametrize(
    ("given", "message"),
    [({"use_cache": True}, "use_cache"), ({"attention_mask": torch.zeros(1, 3)}, "attention_mask")],
)
def test_an_lstm_refuses_what_it_does_not_do(given, message):
    config = AutoConfig.for_model("lstm_lm", vocab_size=30, hidden_size=12, num_hidden_layers=1)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(config)(torch.ones(1, 3, dtype=torch.long), **given)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
RECURRENT = {"hidden_size": 16, "num_hidden_layers": 1}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
OF_PAPERS = {
    "language model": {
        "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
        "llama": SMALL,
        "mamba": RECURRENT | {"state_size": 4},
        "rwkv": RECURRENT | {"num_hidden_layers": 2, "attention_hidden_size": 16, "intermediate_size": 16},
    },
    "summarizer": {"t5": T5, "longt5": T5},
    "denoiser": {"t5": T5},
    "classifier": {
        "t5": T5,
        "bert": SMALL,
        "funnel": {"d_model": 16, "block_sizes": [1], "n_head": 2, "d_head": 8, "d_inner": 16},
        "longformer": SMALL | {"attention_window": [4]},
        "fnet": RECURRENT | {"intermediate_size": 16},
    },
}


def of_a_paper(kind, **given):
    """The model that a recipe builds of these arguments, and its tokenizer."""
    rows = {"text": ["a text about something"] * 4, "summary": ["something"] * 4, "label": [0, 1, 0, 1]}
    if kind == "language model":
        tokenizer = AutoTokenizer.from_pretrained("checkpoints/longhorn-books")
        return pretrain_clm.build_model(pretrain_clm.ModelArguments(**given), tokenizer), tokenizer
    if kind == "summarizer":
        options = {"source_column": "text", "target_column": "summary", "tokenizer_vocab_size": 300}
        arguments = finetune_summarization.SummarizationArguments(train_files=["given"], **given, **options)
        return finetune_summarization.build(arguments, rows)
    if kind == "denoiser":
        tokenizer = pretrain_seq2seq.with_sentinels(train_tokenizer(rows["text"], 300), trained_here=True)
        return pretrain_seq2seq.build_model(pretrain_seq2seq.SpanArguments(**given), tokenizer, 8), tokenizer
    task = finetune_glue.TASKS["sst2"]
    return finetune_glue.build(finetune_glue.GlueArguments(["sst2"], **given), task, rows | {"sentence": rows["text"]})


@pytest.mark.parametrize(("kind", "model_type"), [(kind, name) for kind, names in OF_PAPERS.items() for name in names])
def test_what_papers_compare_with_can_be_trained(kind, model_type):
    """Those that transformers has."""
    model, tokenizer = of_a_paper(kind, model_type=model_type, config=OF_PAPERS[kind][model_type])
    ids = torch.tensor([[*tokenizer("a text about")["input_ids"], tokenizer.eos_token_id]])
    loss = model(input_ids=ids, labels=torch.tensor([1]) if kind == "classifier" else ids).loss
    loss.backward()
    assert loss.isfinite() and model.config.eos_token_id == tokenizer.eos_token_id
    assert kind == "language model" or model.config.pad_token_id is not None
    if kind in ("summarizer", "denoiser"):
        assert model.config.decoder_start_token_id == model.config.pad_token_id == tokenizer.pad_token_id
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[0] == 1


def test_a_gated_delta_net_starts_with_a_memory_and_is_qwen3_next_else(tmp_path):
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_experts": 0}
    sizes |= {"layer_types": ["linear_attention"] * 2, "mlp_only_layers": [0, 1], "use_cache": False}
    sizes |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    config = AutoConfig.for_model("gated_delta_net", **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    steps = {name: value for name, value in model.named_parameters() if name.endswith("dt_bias")}
    assert len(steps) == 2
    for value in steps.values():
        step = torch.nn.functional.softplus(value)
        assert 0.001 <= step.min() < 0.01 < step.max() <= 0.1
    model.save_pretrained(tmp_path)
    theirs = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)).eval()
    theirs.load_state_dict(model.state_dict())
    ids = torch.randint(0, 50, (2, 20))
    for other in (theirs, AutoModelForCausalLM.from_pretrained(tmp_path)):
        torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=0, atol=0)
