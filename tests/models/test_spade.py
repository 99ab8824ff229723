"""The SPADE family: layers against a plain evaluation, sizes, encoder-decoders, heads, and refusals."""

import copy
import pickle

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
)

from hf_hybrid_ssm import (
    SpadeConfig,
    SpadeEncoderModel,
    SpadeForCausalLM,
    SpadeForConditionalGeneration,
    SpadeForSequenceClassification,
    SpadeSeq2SeqConfig,
)
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from tests import tiny_models as tiny
from tests.models import invariances as inv

TINY = tiny.TOKENS | tiny.SPADE
VARIANTS = {
    "s4-alone": {"sliding_window": 1, "ssm_layers": [0, 1]},
    "s4-window": {},
    "s4d-chunk-add-post": {
        "ssm_type": "s4d",
        "attention_type": "chunk",
        "ssm_merge": "add",
        "norm_position": "post",
    },
    "s5-window-stack": {"ssm_type": "s5", "ssm_merge": "stack", "ssm_layers": [1]},
    "hyena-full": {"ssm_type": "hyena", "filter_length": 16, "attention_type": "full"},
    "ema-window-all": {"ssm_type": "ema", "ssm_layers": [0, 1], "relative_bias_scope": "per_layer"},
    "lstm-chunk": {"ssm_type": "lstm", "attention_type": "chunk", "relative_bias_scope": "none"},
    "adaptive": {"adaptive_cutoffs": [20, 40], "adaptive_factor": 2, "scale_embedding": True},
}


def build(model_class, config, seed=0):
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():  # away from the smooth initial point, so that a mistake shows
        if parameter.requires_grad and ".ssm." not in name:
            parameter.data.mul_(1.5)
        if "relative_bias" in name:
            parameter.data.normal_()
    return model


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_bias_by_distance(bidirectional):
    layer = RelativeBias(2, 8, 20, bidirectional=bidirectional)
    table = layer(None)
    if not bidirectional:
        assert torch.equal(table[:, 0], layer.weight[0]) and torch.equal(table[:, -1], layer.weight[7])
        assert layer(3).shape == (2, 4)
    else:
        middle = table.shape[1] // 2
        assert torch.equal(table[:, middle], layer.weight[0])
        assert torch.equal(table[:, middle + 1], layer.weight[1])  # one back
        assert torch.equal(table[:, middle - 1], layer.weight[5])  # one ahead


def plain_block(block, config, x, bias, is_causal):
    """The layer of the paper, with an L x L attention, for one row of float64."""
    mixing, length = block.mixing, x.shape[0]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (
        distance.abs() <= (config.sliding_window - 1) if config.attention_type == "window" else distance.abs() < length
    )
    if config.attention_type == "chunk":
        chunk = torch.arange(length) // config.chunk_size
        seen = chunk[:, None] == chunk
    seen = seen & (distance >= 0) if is_causal else seen

    def attention(n):
        attn, heads = mixing.self_attn, config.num_attention_heads
        q, k, v = (f(n).view(length, heads, -1).transpose(0, 1) for f in (attn.q_proj, attn.k_proj, attn.v_proj))
        scores = q @ k.transpose(1, 2) / (config.hidden_size // heads) ** 0.5
        if bias is not None:
            middle = 0 if is_causal else bias.shape[1] // 2
            scores = scores + bias[:, (distance + middle).clamp(0, bias.shape[1] - 1)]
        return attn.o_proj((torch.where(seen, scores, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1))

    def mix(n):
        if mixing.ssm is None:
            return attention(n)
        g = mixing.ssm(n[None])[0][0]
        if config.ssm_merge == "stack":
            return attention(g)
        g, a = mixing.norm_global(g), mixing.norm_local(attention(n))
        if config.ssm_merge == "add":
            return 0.5 * g + 0.5 * a
        return torch.cat([g, a], 1) @ mixing.aggregate.weight.T + mixing.aggregate.bias

    def feed(n):
        return (
            torch.relu(n @ block.feed_forward.fc1.weight.T + block.feed_forward.fc1.bias)
            @ (block.feed_forward.fc2.weight.T)
            + block.feed_forward.fc2.bias
        )

    if config.norm_position == "pre":
        x = x + mix(block.mixing_norm(x))
        return x + feed(block.feed_forward_norm(x))
    x = block.mixing_norm(x + mix(x))
    return block.feed_forward_norm(x + feed(x))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("variant", ["s4-window", "s4-alone", "s4d-chunk-add-post", "s5-window-stack", "hyena-full"])
def test_stack_equals_the_equations(variant, is_causal):
    config = SpadeConfig(**TINY | VARIANTS[variant] | {"dropout": 0.0})
    base = build(SpadeForCausalLM if is_causal else SpadeEncoderModel, config).double()
    stack = base.model if is_causal else base.encoder
    x = torch.randn(17, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = stack(inputs_embeds=x[None]).last_hidden_state[0]
    bias = None if stack.relative_bias is None else stack.relative_bias(None)
    want = x if stack.embedding_norm is None else stack.embedding_norm(x)
    for block in stack.layers:
        want = plain_block(block, config, want, bias, is_causal)
    want = want if stack.norm is None else stack.norm(want)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("preset", [name for name in SpadeConfig.presets if "lra" in name])
def test_arena_presets_have_less_than_two_million_parameters(preset):
    with torch.device("meta"):
        model = SpadeForSequenceClassification(SpadeConfig.preset(preset))
    assert sum(p.numel() for p in model.parameters()) < 2_000_000


def seq2seq(**fields):
    return build(SpadeForConditionalGeneration, SpadeSeq2SeqConfig(**TINY | {"num_decoder_layers": 2} | fields))


PAPER = {"decoder_attention_type": "window", "decoder_ssm_layers": [0]}
PAPER |= {"decoder_position_embedding_type": "relative"}


def test_a_decoder_as_the_paper_says_has_no_longest_target():
    """No position embedding of fixed length, a state-space model at the bottom, and a cache that does not grow."""
    model = seq2seq(**PAPER, max_target_positions=8)
    source, target = inv.random_ids(model, 1, 9, 0), inv.random_ids(model, 1, 40, 1)
    sizes = []
    for length in (20, 40):
        past = model(source, decoder_input_ids=target[:, :length], use_cache=True).past_key_values
        states = [layer.states for layer in past.self_attention_cache.layers]
        sizes.append([{name: state.shape for name, state in own.items()} for own in states])
    assert sizes[0] == sizes[1] and ["ssm_0" in own for own in sizes[0]] == [True, False]
    with pytest.raises(ValueError, match="max_target_positions"):
        seq2seq(max_target_positions=8)(source, decoder_input_ids=target)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("fields", [{}, PAPER])
def test_a_cache_that_was_reset_forgets_the_source(fields, kind):
    model = seq2seq(**fields)
    options = {"max_cache_len": 20} if kind is StaticCache else {}
    cache = EncoderDecoderCache(kind(config=model.config, **options), kind(config=model.config, **options))
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for seed in range(3):
        source = inv.random_ids(model, 2, 13, seed)
        expected = model.generate(source, **settings, use_cache=False)
        assert torch.equal(model.generate(source, **settings, past_key_values=cache), expected)
        cache.reset()


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_target_goes_on_with_the_source_it_began_with(kind):
    """Given again, encoded again or copied with its cache; another source, or one of another length, is refused."""
    model, target = seq2seq(**PAPER), inv.random_ids(seq2seq(), 2, 7, 1)
    source, other = (inv.random_ids(model, 2, 13, seed) for seed in (0, 2))
    mask = torch.ones_like(source)
    mask[1, 9:] = 0
    options = {"max_cache_len": 20} if kind is StaticCache else {}

    @torch.no_grad()
    def read(cache, columns, source=source, mask=mask, **given):
        inputs = {"attention_mask": mask, "decoder_input_ids": target[:, columns], "past_key_values": cache}
        return model(None if given else source, **inputs, **given).logits

    expected = read(None, slice(None))
    for encodes in (True, False):
        given = {} if encodes else {"encoder_outputs": model.get_encoder()(source, mask)}
        cache = EncoderDecoderCache(kind(config=model.config, **options), kind(config=model.config, **options))
        parts = [read(cache, slice(column, column + 1), **given) for column in range(3)]
        cache = pickle.loads(pickle.dumps(cache)) if encodes else copy.deepcopy(cache)
        changed = other[:, :1]
        for wrong in (other, source[:, :9], torch.cat([changed, source[:, 1:]], 1)):
            with pytest.raises(ValueError, match="cache was filled with another source: input_ids"):
                read(cache, slice(3, 4), wrong, mask[:, : wrong.shape[1]])
        with pytest.raises(ValueError, match="cache was filled with another source: input_ids"):
            read(cache, slice(3, 4), encoder_outputs=model.get_encoder()(other, mask))
        parts += [read(cache, slice(column, column + 1), **given) for column in range(3, 7)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)
        rows = torch.tensor([1, 0])
        cache.reorder_cache(rows)
        read(cache, slice(0, 1), source[rows], mask[rows])
        with pytest.raises(ValueError, match="filled with another source"):
            read(cache, slice(0, 1), source, mask)


def test_pieces_of_a_prompt_are_for_one_stack():
    model, source = seq2seq(), inv.random_ids(seq2seq(), 1, 13, 0)
    with pytest.raises(ValueError, match="prefill_chunk_size=4 is for models of one stack"):
        model.generate(source, attention_mask=torch.ones_like(source), max_new_tokens=2, prefill_chunk_size=4)


def test_encoder_decoder_assisted_equals_greedy():
    """Drafts that are rejected roll the decoder's states back."""
    model, source = seq2seq(), inv.random_ids(seq2seq(), 1, 13, 0)
    settings = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(source, **settings)
    assistant = seq2seq()
    for parameter in assistant.parameters():  # a draft that is often, not always, right
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    for mask in ({}, {"attention_mask": torch.ones_like(source)}):  # of the source, which the assistant reads too
        assert torch.equal(model.generate(source, **mask, **settings, assistant_model=assistant), expected)
    assert torch.equal(model.generate(source, **settings, prompt_lookup_num_tokens=2), expected)


def test_loss_shifts_the_labels_right():
    model = seq2seq()
    source, labels = inv.random_ids(model, 2, 9, 0), inv.random_ids(model, 2, 6, 1)
    labels[1, 4:] = -100
    decoder_input = torch.cat([torch.zeros(2, 1, dtype=torch.long), labels[:, :-1].clamp(min=0)], 1)
    logits = model(source, decoder_input_ids=decoder_input).logits
    loss = model(source, labels=labels).loss
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, want)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_classifier_ignores_padding_and_looks_both_ways(pooling):
    model = build(SpadeForSequenceClassification, SpadeConfig(**TINY, num_labels=3, pooling=pooling))
    ids = inv.random_ids(model, 2, 14, 0)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[1], model(ids[1:, 5:]).logits[0], rtol=1e-5, atol=1e-5)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] - 2) % 58 + 3
    assert not torch.allclose(model(changed).logits[0], model(ids).logits[0])
    assert model(ids, labels=torch.tensor([0, 2])).loss > 0


def test_an_encoder_takes_the_embeddings_of_a_language_model(tmp_path):
    model = build(SpadeForCausalLM, SpadeConfig(**TINY | {"norm_position": "post", "final_norm": True}))
    model.save_pretrained(tmp_path)
    encoder, report = SpadeEncoderModel.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(encoder.embed_tokens.weight, model.model.embed_tokens.weight)
    assert not report["unexpected_keys"] and report["missing_keys"]
    assert all(key.startswith("encoder.") for key in report["missing_keys"])


def test_only_the_language_model_has_a_pipeline_plan():
    config, both = SpadeConfig(**TINY), SpadeSeq2SeqConfig(**TINY, num_decoder_layers=1)
    assert SpadeForCausalLM(config).supports_pp_plan
    assert not SpadeEncoderModel(config).supports_pp_plan and not SpadeForConditionalGeneration(both).supports_pp_plan


def test_pixels():
    config = SpadeConfig(**TINY | {"vocab_size": 256, "pixel_input": True, "norm_type": "batchnorm", "num_labels": 4})
    model = SpadeForSequenceClassification(config)
    loss = model(torch.randint(0, 256, (3, 16)), labels=torch.tensor([0, 1, 3])).loss
    loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    wide = SpadeForSequenceClassification(SpadeConfig(**TINY | {"pixel_input": True, "hidden_size": 512})).model
    assert 0.85 < wide.embed_tokens.weight.std() < 1.15  # as MEGA's: values of about 1 stay of about 1
    assert 0.085 < wide.embed_tokens.bias.std() < 0.115


@pytest.mark.parametrize("stops", [False, True])
def test_a_stopped_gradient_does_not_enter_the_state_space_model(stops):
    model = SpadeForCausalLM(SpadeConfig(**TINY, ssm_trainable="all", ssm_stop_gradient=stops)).train()
    seen = {}
    ssm = next(layer.mixing.ssm for layer in model.model.layers if layer.mixing.ssm is not None)
    ssm.register_forward_hook(lambda _, given, out: seen.update(given=given[0], out=out[0]))
    model(torch.arange(12).view(1, -1) % TINY["vocab_size"])
    assert seen["given"].requires_grad != stops and seen["out"].requires_grad


def test_adaptive_softmax_is_a_distribution_of_tied_weights():
    model = build(SpadeForCausalLM, SpadeConfig(**TINY | VARIANTS["adaptive"])).double()
    ids = inv.random_ids(model, 2, 9, 0)
    logits = model(ids).logits
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 9, dtype=torch.float64))
    h = model.model(ids).last_hidden_state
    embedding, head = model.model.embed_tokens, model.lm_head
    first = torch.cat([embedding.tables[0], head.clusters]) @ h[0, 0]
    inner = embedding.tables[2] @ embedding.projections[2].T @ h[0, 0]
    want = first.log_softmax(0)[21] + inner.log_softmax(0)[5]
    torch.testing.assert_close(logits[0, 0, 45], want)


def test_adaptive_loss_by_band_equals_the_whole_distribution():
    fields = TINY | VARIANTS["adaptive"] | {"use_linear_cross_entropy": True, "adaptive_dropout": 0.0}
    fields |= {"dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}
    model = build(SpadeForCausalLM, SpadeConfig(**fields)).double()
    ids = inv.random_ids(model, 2, 30, 0)
    labels = ids.masked_fill(ids == ids[0, 3], -100)
    whole = model(ids, labels=labels)
    whole.loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    by_band = model.train()(ids, labels=labels)
    assert by_band.logits is None and whole.logits is not None
    torch.testing.assert_close(by_band.loss.to(whole.loss.dtype), whole.loss, rtol=1e-6, atol=1e-6)
    by_band.loss.backward()
    for name, gradient in wanted.items():  # transformers' loss computes in float32
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-6)
    total = model(ids, labels=labels, num_items_in_batch=7).loss
    torch.testing.assert_close(total * 7, by_band.loss * (labels[:, 1:] != -100).sum())


def test_pairs_are_encoded_each_for_itself():
    model = build(SpadeForSequenceClassification, SpadeConfig(**TINY, num_labels=2, paired_input=True, pooling="mean"))
    ids = inv.random_ids(model, 4, 11, 0).view(2, 2, 11)
    mask = torch.ones_like(ids)
    mask[0, 1, 7:] = 0
    logits = model(ids, attention_mask=mask, labels=torch.tensor([0, 1])).logits
    first = model.model(ids[:1, 0]).last_hidden_state.mean(1)
    second = model.model(ids[:1, 1, :7]).last_hidden_state.mean(1)
    head = model.classifier
    want = head.out_proj(head.activation(head.dense(torch.cat([second, first], 1))))
    torch.testing.assert_close(logits[:1], want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"\(batch, 2, length\)"):
        model(ids[:, 0])


def test_frozen_by_default_and_trained_on_request():
    frozen = SpadeForCausalLM(SpadeConfig(**TINY))
    assert not any(p.requires_grad for n, p in frozen.named_parameters() if ".ssm." in n)
    trained = SpadeForCausalLM(SpadeConfig(**TINY, ssm_trainable="all"))
    assert all(p.requires_grad for n, p in trained.named_parameters() if ".ssm." in n)
    assert frozen.state_dict().keys() == trained.state_dict().keys()


def test_a_mask_of_another_source():
    model = seq2seq()
    ids = inv.random_ids(model, 2, 9, 0)
    with pytest.raises(ValueError, match="attention_mask must have"):
        model(ids, attention_mask=torch.ones(2, 5), decoder_input_ids=ids[:, :3])
    with pytest.raises(ValueError, match="labels has ids from"):
        model(ids, labels=torch.full((2, 3), 61))
