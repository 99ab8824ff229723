"""What transformers' tools ask of a model: its base by `AutoModel`, its encoder, attention weights, early exits."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

import hf_hybrid_ssm
from hf_hybrid_ssm.models import FAMILIES
from tests.tiny_models import CASES, ROWS, SIZES, built, language_model

FIELDS = dict(reversed(CASES.values()))  # the first of each
HEADS = [(family.model_type, name) for family in FAMILIES for name in family.heads.values()]
CAUSAL = [case for case in CASES if "classifier" not in case]


@pytest.mark.parametrize(("model_type", "name"), HEADS, ids=[name for _, name in HEADS])
def test_auto_model_is_the_base_of_a_checkpoint(model_type, name, tmp_path):
    """With its trained weights, all of them, whichever class was saved."""
    torch.manual_seed(0)
    sides = {"bidirectional": True} if name == "BstForMaskedLM" else {}
    config = AutoConfig.for_model(model_type, **SIZES | FIELDS[model_type] | sides)
    model = getattr(hf_hybrid_ssm, name)(config).eval()
    model.save_pretrained(tmp_path)
    loaded, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    base = model.base_model
    assert isinstance(loaded, type(base))
    assert not report["missing_keys"] and not report["mismatched_keys"]
    for key, value in base.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    assert type(AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))) is type(loaded)


def test_heads_load_each_others_bodies(tmp_path):
    config = AutoConfig.for_model("spade", **SIZES | FIELDS["spade"])
    classifier = hf_hybrid_ssm.SpadeForSequenceClassification(config)
    classifier.save_pretrained(tmp_path)
    tagger, report = hf_hybrid_ssm.SpadeForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert all(key.startswith("score") for key in report["missing_keys"])
    for key, value in classifier.model.state_dict().items():
        assert torch.equal(tagger.model.state_dict()[key], value)


@pytest.mark.parametrize("case", CASES)
def test_attention_weights_are_refused_where_there_are_none(case):
    model, ids = built(case, attn_implementation="eager").eval(), torch.randint(3, 50, (2, 9))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with pytest.raises(ValueError, match="output_attentions=True cannot be answered"):
        model(**inputs, output_attentions=True)
    if model.can_generate():
        with pytest.raises(ValueError, match="output_attentions=True cannot be answered"):
            model.generate(ids, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"output_attentions=True cannot be answered|attribute is not supported"):
        model.config.output_attentions = True  # which a student's configuration, as its teacher's, may refuse itself
        model(**inputs)
    assert model(**inputs, output_attentions=False).logits.isfinite().all()


def test_attention_weights_of_full_attention_are_given():
    kinds = {"layer_types": ["longhorn", "full_attention", "full_attention"]}
    model = built("longhorn hybrid", **kinds, attn_implementation="eager").eval()
    attentions = model(torch.randint(3, 50, (2, 9)), output_attentions=True).attentions
    assert [weights.shape for weights in attentions] == [(2, 4, 9, 9)] * 2
    torch.testing.assert_close(attentions[0].sum(-1), torch.ones(2, 4, 9))


@pytest.mark.parametrize("case", CAUSAL)
def test_early_exit_drafts_the_greedy_text(case):
    """The first layer drafts, the whole model checks, in one cache each."""
    more = (
        {"num_hidden_layers": 3}
        if case not in ("bst brect", "longhorn hybrid", "student", "student with a mixer")
        else {}
    )
    model, ids = built(case, **more).eval(), torch.randint(3, 50, (1, 9))
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "use_cache": True}
    greedy = model.generate(ids, **settings)
    before, depths = model.config.to_dict(), []
    stack = model.base_model.decoder if model.config.is_encoder_decoder else model.base_model
    for depth, layer in enumerate(stack.layers):
        layer.register_forward_hook(lambda *_, depth=depth: depths.append(depth))
    assert torch.equal(model.generate(ids, assistant_early_exit=1, **settings), greedy)
    assert model.config.to_dict() == before
    if not model.config.is_encoder_decoder:  # whose early exit is the encoder's
        assert depths.count(0) > depths.count(1) > 0


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (("lmu_isa", {"hidden_dropout": 0.0}), 0.0),
        (("lmu_isa", {"hidden_dropout": 0.3}), 0.3),
        (("bst", {"final_dropout": 0.0}), 0.0),
        (("spade", {"dropout": 0.2}), 0.2),
        (("longhorn", {}), 0.1),
        (("longhorn", {"classifier_dropout": 0.0}), 0.0),
    ],
    ids=str,
)
def test_dropout_of_token_classifiers(fields, wanted):
    family, own = fields
    config = AutoConfig.for_model(family, **SIZES | FIELDS[family] | own)
    name = next(family for family in FAMILIES if family.model_type == config.model_type).heads
    model = getattr(hf_hybrid_ssm, name["MODEL_FOR_TOKEN_CLASSIFICATION"])(config)
    assert model.dropout.p == wanted


def test_the_encoder_is_a_module_of_the_model():
    model = built("spade_seq2seq").eval()
    ids, mask = torch.randint(3, 50, (2, 9)), torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    encoder = model.get_encoder()
    assert isinstance(encoder, nn.Module) and not encoder.training
    own = {id(parameter) for parameter in model.model.parameters()}
    assert {id(parameter) for parameter in encoder.parameters()} <= own
    before = set(model.state_dict())
    states = encoder(input_ids=ids, attention_mask=mask)
    assert set(model.state_dict()) == before
    whole = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    torch.testing.assert_close(states[0], whole.encoder_last_hidden_state)
    given = model(encoder_outputs=states, attention_mask=mask, decoder_input_ids=ids)
    torch.testing.assert_close(given.logits, whole.logits)
    encoder.requires_grad_(False)  # what a freezing recipe does
    assert not any(parameter.requires_grad for parameter in model.model.encoder.parameters())


@pytest.mark.parametrize("row", ROWS)
def test_continuous_batching_is_refused_and_a_left_padded_batch_gives_the_same_text(row):
    model, prompts = language_model(row), [list(range(3, 3 + length)) for length in (9, 4, 1)]
    with pytest.raises(ValueError, match=r"no continuous batching \(generate_batch\).*left-padded"):
        model.generate_batch(prompts, max_new_tokens=5)
    with pytest.raises(ValueError, match="no continuous batching"), model.continuous_batching_context_manager():
        pass
    assert not hasattr(model, "init_continuous_batching")  # what `transformers serve` asks
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = torch.tensor([[0] * (9 - len(prompt)) + prompt for prompt in prompts])
    together = model.generate(ids, attention_mask=(ids != 0).long(), **settings)[:, -8:]
    for prompt, text in zip(prompts, together, strict=True):
        assert torch.equal(model.generate(torch.tensor([prompt]), **settings)[0, -8:], text)
