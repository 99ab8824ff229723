"""Inputs, caches and settings that no model can make sense of."""

from functools import cache

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from hf_hybrid_ssm.models.cache import carry_segment
from tests.reliability.refusals import assert_refused, mistakes
from tests.tiny_models import build, class_with_loss, classes_of, config_of

GREEDY = {"max_new_tokens": 2, "do_sample": False}
IDS = torch.arange(3, 15).view(2, 6)  # two rows of six tokens
TARGET = IDS[:, :4]
MIXED = "longhorn + window and full attention"  # one layer of each kind


@cache
def model(variant: str = MIXED, class_name: str | None = None, **fields):
    """One for all callers; with fields of its own as it is initialised."""
    name = class_name or class_with_loss(variant)
    return classes_of(variant)[name](config_of(variant, **fields)).eval() if fields else build(variant, name)


def classifier(**fields):
    return model("longhorn", "LonghornForSequenceClassification", **fields)


def tagger():
    return model("spade s4 window", "SpadeForTokenClassification")


def reader():
    return model("bst sh s4d", "BstForQuestionAnswering")


def encoder_decoder(**fields):
    return model("encoder-decoder", **fields)


def filled(variant: str = MIXED, **fields):
    """A model's cache after the two rows."""
    return model(variant, **fields)(IDS, use_cache=True).past_key_values


def mask(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.long)


def generate(**settings):
    given = {"inputs": IDS, **GREEDY, **settings}
    return lambda: model().generate(**given)


def fewer_rows_than_keys_and_values():
    attention = classes_of(MIXED)["LonghornForCausalLM"](config_of(MIXED, block_types=["full_attention"] * 3)).eval()
    attention(IDS[:1], past_key_values=attention(IDS, use_cache=True).past_key_values)


def fewer_rows_than_an_encoder_decoders_cache():
    past = encoder_decoder()(IDS, decoder_input_ids=TARGET, use_cache=True).past_key_values
    encoder_decoder()(IDS[:1], decoder_input_ids=TARGET[:1], past_key_values=past)


def a_cache_without_an_encoder():
    past = DynamicCache(config=encoder_decoder().config)
    encoder_decoder()(IDS, decoder_input_ids=TARGET, past_key_values=past)


def crop_too_much():
    past = DynamicCache(config=model("longhorn").config)
    past.activate_past_recording()
    model("longhorn")(IDS, past_key_values=past)
    past.layers[0].crop(-15)


# fmt: off
LANGUAGE_MODEL = [
    (lambda: model()(), "ValueError: exactly one of input_ids or inputs_embeds"),
    (lambda: model()(IDS, inputs_embeds=torch.zeros(2, 6, 24)),
     "ValueError: exactly one of input_ids or inputs_embeds"),
    (lambda: model()(IDS.tolist()), "TypeError: input_ids must be a tensor, got list"),
    (lambda: model()(IDS[0]), r"ValueError: input_ids must have shape .*got \(6,\)"),
    (lambda: model()(IDS[None]), r"ValueError: input_ids .*got \(1, 2, 6\)"),
    (lambda: model()(IDS[:, :0]), r"ValueError: input_ids .*length ≥ 1.*got \(2, 0\)"),
    (lambda: model()(IDS.float()), "TypeError: input_ids must be int32 or int64.*float32"),
    (lambda: model()(IDS > 5), "TypeError: input_ids must be int32 or int64.*bool"),
    (lambda: model()(IDS + 50), "ValueError: input_ids has ids from 53 to 64.*is 61"),
    (lambda: model()(-IDS), "ValueError: input_ids has ids from -14 to -3.*vocab_size is 61"),
    (lambda: model()(inputs_embeds=torch.zeros(2, 6, 7)),
     r"ValueError: inputs_embeds must have shape \(batch ≥ 1, length ≥ 1, 24\), got \(2, 6, 7\)"),
    (lambda: model()(inputs_embeds=torch.zeros(2, 6, 24, dtype=torch.long)),
     "TypeError: inputs_embeds must be floating point, got torch.int64"),
    (lambda: model()(inputs_embeds=[[0.0]]), "TypeError: inputs_embeds .* got list"),
    (lambda: model()(IDS, [[1] * 6] * 2), "TypeError: attention_mask .* got list"),
    (lambda: model()(IDS, mask(2, 5)), r"ValueError: attention_mask .*got \(2, 5\)"),
    (lambda: model()(IDS, mask(2, 9)), r"ValueError: \(2, 6\), got \(2, 9\): 0 tokens"),
    (lambda: model()(IDS, mask(3, 6)), r"ValueError: attention_mask .*got \(3, 6\)"),
    (lambda: model()(IDS, mask(2, 6)[:, None, None]), r"ValueError: attention_mask .*got \(2, 1, 1, 6\)"),
    (lambda: model()(IDS, torch.tensor([[0.0] * 6, [-1e9] * 3 + [0.0] * 3])),
     "ValueError: attention_mask must be 1 for text and 0 for padding.*additive"),
    (lambda: model()(IDS, torch.tensor([[1, 1, 1, 2, 2, 2]] * 2)),
     "ValueError: attention_mask must be 1 .*from 1 to 2; documents .* seq_idx"),
    (lambda: model()(IDS, torch.full((2, 6), torch.nan)), "ValueError: attention_mask must be 1 .*nan"),
    (lambda: model()(IDS, position_ids=torch.arange(4)[None]),
     r"ValueError: position_ids must have shape .*\(2, 6\), got \(1, 4\)"),
    (lambda: model()(IDS, position_ids=torch.arange(6)), r"ValueError: position_ids .*got \(6,\)"),
    (lambda: model()(IDS, position_ids=torch.arange(6).expand(3, 6)), r"ValueError: position_ids .*got \(3, 6\)"),
    (lambda: model()(IDS, position_ids=torch.arange(6.0)[None]),
     "TypeError: position_ids must be an int32 or int64 tensor, got torch.float32"),
    (lambda: model()(IDS, seq_idx=[[0] * 6] * 2), "TypeError: seq_idx must be a tensor.*list"),
    (lambda: model()(IDS, seq_idx=torch.zeros(2, 6)), "TypeError: seq_idx must be int32 or int64"),
    (lambda: model()(IDS, seq_idx=mask(2, 4)), r"ValueError: seq_idx must have shape .*\(2, 6\), got \(2, 4\)"),
    (lambda: model()(IDS, seq_idx=torch.tensor([[0, 0, 1, 1, 0, 0]] * 2)), "ValueError: seq_idx must not decrease"),
    (lambda: model()(IDS, labels=IDS.tolist()), "TypeError: labels must be a tensor.*list"),
    (lambda: model()(IDS, labels=IDS.float()), "TypeError: labels must be int32 or int64"),
    (lambda: model()(IDS, labels=IDS[:, 1:]),
     r"ValueError: labels must have the input's shape .*\(2, 6\), got \(2, 5\)"),
    (lambda: model()(IDS, labels=IDS[:1]), r"ValueError: labels .*got \(1, 6\)"),
    (lambda: model()(IDS, labels=IDS.flatten()), r"ValueError: labels .*got \(12,\)"),
    (lambda: model()(IDS, labels=IDS + 50), "ValueError: labels has ids from 53 to 64"),
    (lambda: model()(IDS, labels=0 * IDS - 1), "ValueError: labels has ids from -1 to -1"),
    (lambda: model()(IDS, logits_to_keep=-2), "ValueError: logits_to_keep=-2 must be"),
    (lambda: model("spade adaptive")(IDS + 60),
     "ValueError: input_ids has ids from 63 to 74.*vocab_size is 61"),
]
CLASSIFIER = [
    (lambda: classifier()(IDS, labels=[0, 1]), "TypeError: labels must be a tensor, got list"),
    (lambda: classifier()(IDS, labels=torch.tensor([0, 7])),
     r"ValueError: labels has classes from 0 to 7, but num_labels=2"),
    (lambda: classifier()(IDS, labels=torch.tensor([0, -2])), "ValueError: labels has classes from -2 to 0"),
    (lambda: classifier()(IDS, labels=torch.tensor([0])),
     r"ValueError: labels must have shape \(batch,\) = \(2,\), got \(1,\)"),
    (lambda: classifier()(IDS, labels=IDS), r"ValueError: labels .*\(2,\), got \(2, 6\)"),
    (lambda: classifier()(IDS, labels=torch.zeros(2, 3)),
     r"ValueError: labels must have shape \(batch, num_labels\) = \(2, 2\).*got \(2, 3\)"),
    (lambda: classifier(problem_type="single_label_classification")(IDS, labels=torch.tensor([0.0, 1.0])),
     "TypeError: labels must be int32 or int64 class indices.*float32"),
    (lambda: model("spade s4 window", "SpadeForSequenceClassification")(IDS, labels=torch.tensor([2, 0])),
     "ValueError: labels has classes from 0 to 2, but num_labels=2"),
    (lambda: classifier(pad_token_id=None)(IDS),
     "ValueError: needs an attention_mask or config.pad_token_id"),
    (lambda: model("spade s4 window", "SpadeForSequenceClassification", paired_input=True)(IDS),
     r"ValueError: input_ids must have shape \(batch, 2, length\) with paired_input=True, got \(2, 6\)"),
]
TAGGER = [
    (lambda: tagger()(IDS, labels=IDS.tolist()), "TypeError: labels must be an int.*got list"),
    (lambda: tagger()(IDS, labels=IDS.float()), "TypeError: labels must be an int.*float32"),
    (lambda: tagger()(IDS, labels=IDS[:, 0]), r"ValueError: labels must have .*\(2, 6\), got \(2,\)"),
    (lambda: tagger()(IDS, labels=IDS % 3), "ValueError: labels has classes from 0 to 2, but num_labels=2"),
]
SPANS = [
    (lambda: reader()(IDS, start_positions=torch.tensor([0, 1])), "ValueError: end_positions is missing"),
    (lambda: reader()(IDS, start_positions=torch.tensor([0, 1]), end_positions=torch.tensor([2])),
     r"ValueError: end_positions must have shape \(batch,\) = \(2,\), got \(1,\)"),
    (lambda: reader()(IDS, start_positions=torch.tensor([0, -1]), end_positions=torch.tensor([0, -1])),
     "ValueError: start_positions must be at least 0, got -1"),
    (lambda: reader()(IDS, start_positions=torch.zeros(2), end_positions=torch.zeros(2)),
     "TypeError: start_positions must be an int32 or int64 tensor, got torch.float32"),
]
ENCODER_DECODER = [
    (lambda: encoder_decoder()(IDS), "ValueError: exactly one of decoder_input_ids or decoder_inputs_emb"),
    (lambda: encoder_decoder()(decoder_input_ids=TARGET), "ValueError: exactly one of input_ids"),
    (lambda: encoder_decoder()(IDS, decoder_input_ids=TARGET[:1]),
     "ValueError: decoder_input_ids has a batch of 1, but the encoder's input has one of 2"),
    (lambda: encoder_decoder()(IDS, decoder_input_ids=TARGET + 60),
     "ValueError: decoder_input_ids has ids from 63 to"),
    (lambda: encoder_decoder()(IDS, decoder_input_ids=torch.full((2, 65), 5)),
     "ValueError: 65 tokens, but max_target_positions=64"),
    (lambda: encoder_decoder()(IDS, mask(2, 5), decoder_input_ids=TARGET),
     r"ValueError: attention_mask must have .*got \(2, 5\)"),
    (lambda: encoder_decoder()(IDS, decoder_input_ids=TARGET, decoder_attention_mask=mask(2, 3)),
     r"ValueError: decoder_attention_mask must have .*got \(2, 3\)"),
    (lambda: encoder_decoder()(encoder_outputs="states", decoder_input_ids=TARGET),
     r"TypeError: encoder_outputs\[0\] must be a tensor of shape .*got str"),
    (lambda: encoder_decoder()(encoder_outputs=(torch.zeros(2, 5, 7),), decoder_input_ids=TARGET),
     r"ValueError: encoder_outputs\[0\] must have shape .*24\), got \(2, 5, 7\)"),
    (lambda: encoder_decoder()(IDS, decoder_input_ids=TARGET, labels=IDS),
     r"ValueError: labels must have .*\(2, 4\), got \(2, 6\)"),
    (lambda: encoder_decoder()(IDS, labels=IDS[0]),
     r"ValueError: labels must have shape \(batch, length\).*got \(6,\)"),
    (lambda: encoder_decoder(decoder_start_token_id=None)(IDS, labels=IDS),
     "ValueError: decoder_start_token_id=None and pad_token_id=0 .* must both be set"),
    (a_cache_without_an_encoder,
     "TypeError: past_key_values must be an EncoderDecoderCache, got DynamicCache"),
    (fewer_rows_than_an_encoder_decoders_cache,
     "ValueError: past_key_values holds a batch of 2 .*batch of 1"),
]
CACHES = [
    (lambda: model()(IDS, past_key_values=((IDS, IDS),)),
     "TypeError: past_key_values must be a transformers Cache of one stack, got tuple"),
    (lambda: model()(IDS[:1], past_key_values=filled()),
     "ValueError: past_key_values holds a batch of 2 .*batch of 1"),
    (fewer_rows_than_keys_and_values,
     "ValueError: past_key_values holds a batch of 2 .*batch of 1"),
    (lambda: model()(IDS, past_key_values=DynamicCache(config=model("lmu-isa").config)),
     r"ValueError: past_key_values has layers \['RecurrentStateLayer', 'RecurrentStateLayer'\].*3 layers"),
    (lambda: model()(IDS, past_key_values=filled("longhorn")),
     "ValueError: past_key_values has layers .*which are not those of this model"),
    *(
        (lambda given=given, taken=taken: model(taken)(IDS, past_key_values=filled(given)),
         f"ValueError: past_key_values was filled by a model of the family '{of}'.*'{family}'")
        for given, of, taken, family in (
            ("longhorn", "longhorn", "bst sh s4d", "bst"), ("bst sh s4d", "bst", "longhorn", "longhorn"),
            ("spade s4 window", "spade", "lmu-isa", "lmu_isa"), ("lmu-isa", "lmu_isa", "spade s4 window", "spade"),
        )
    ),
    (lambda: model("longhorn")(IDS, past_key_values=filled("longhorn", hidden_size=32)),
     r"ValueError: initial_state must have shape .*48\), got \(2, 3, 64\)"),
    (lambda: model("bst sh s4d")(IDS, past_key_values=filled("bst mh s4")),
     "ValueError: state must have shape"),
    (lambda: model("bst s5 bidirectional", "BstModel")(IDS, past_key_values=DynamicCache()),
     "ValueError: past_key_values cannot be used with a bidirectional BstModel"),
    (lambda: model()(IDS, mask(2, 9), past_key_values=filled()),
     r"ValueError: attention_mask .*\(2, 12\), got \(2, 9\): 6 tokens are in the cache, 6 are given"),
    (lambda: filled("longhorn").crop(-2), "RuntimeError: crop needs the recorded past: call `activate_past_recording"),
    (lambda: filled("longhorn").layers[0].crop(2), "ValueError: tokens_to_remove=2 must be negative"),
    (crop_too_much, "ValueError: goes 9 tokens beyond the recorded past"),
    (lambda: carry_segment(filled(), torch.tensor([True, False])),
     "ValueError: layer 2 of past_key_values is a DynamicLayer"),
    (lambda: carry_segment(filled("longhorn"), torch.tensor([True])),
     r"ValueError: begins must be bool of shape \(batch,\) = \(2,\)"),
    (lambda: filled("longhorn").update(torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 8), 0),
     "TypeError: a RecurrentStateLayer holds no keys and values"),
    (lambda: model()(IDS, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache())),
     "TypeError: past_key_values must be .*got EncoderDecoderCache"),
]
GENERATION = [
    (generate(max_new_tokens=0), "ValueError: `max_new_tokens` must be greater than 0, but is 0"),
    (generate(max_new_tokens=None, max_length=2), "ValueError: `max_length`.* 2"),
    (generate(num_return_sequences=3), "ValueError: `num_return_sequences`.*got 3"),
    (generate(do_sample=True, temperature=0.0), r"ValueError: `temperature` \(=0.0\)"),
    (generate(do_sample=True, temperature=-1.0), r"ValueError: `temperature` \(=-1.0\)"),
    (generate(do_sample=True, top_k=-1), "ValueError: `top_k`.*-1"),
    (generate(repetition_penalty=-1.0), "ValueError: strictly positive.*-1.0"),
    (generate(temprature=2), r"ValueError: not used by the model: \['temprature'\]"),
    (generate(cache_implementation="ring"), r"ValueError: \(ring\). Choose one of"),
    (generate(bad_words_ids=[]), "ValueError: `bad_words_ids` has to be a non-empty list"),
    (generate(stop_strings="end"), "ValueError: stop strings.*tokenizer"),
    (generate(inputs=IDS + 50), "ValueError: input_ids has ids from 53 to 64"),
    (generate(inputs=IDS.float()), "TypeError: input_ids must be int32 or int64"),
    (generate(attention_mask=mask(2, 4).tril(1)), r"ValueError: attention_mask .*got \(2, 4\)"),
    (generate(attention_mask=mask(2, 9).tril(7)), r"ValueError: attention_mask .*got \(2, 9\)"),
    (generate(attention_mask=torch.full((2, 6), -1e9)), "ValueError: attention_mask must be 1 for text.*additive"),
    (generate(past_key_values=()), "ValueError: tuple of `past_key_values`.*`Cache`"),
    (lambda: model().generate(IDS[:, :3], past_key_values=filled(), **GREEDY),
     "ValueError: input_ids must have shape"),
    (lambda: model().generate(IDS[:1].repeat(1, 2), past_key_values=filled(), **GREEDY),
     "ValueError: past_key_values holds a batch of 2"),
    (lambda: encoder_decoder().generate(IDS, max_new_tokens=99, min_new_tokens=99, do_sample=False),
     "ValueError: 65 tokens, but max_target_positions=64"),
    (lambda: model("longhorn", "LonghornModel").generate(IDS),
     "AttributeError: 'LonghornModel' object has no attribute 'generate'"),
]
# fmt: on


@mistakes(LANGUAGE_MODEL)
def test_mistakes_of_language_model(call, answer):
    assert_refused(call, answer)


@mistakes(CLASSIFIER)
def test_mistakes_of_classifier(call, answer):
    assert_refused(call, answer)


@mistakes(TAGGER)
def test_mistakes_of_token_classifier(call, answer):
    assert_refused(call, answer)


@mistakes(SPANS)
def test_mistakes_of_question_answering(call, answer):
    assert_refused(call, answer)


@mistakes(ENCODER_DECODER)
def test_mistakes_of_encoder_decoder(call, answer):
    assert_refused(call, answer)


@mistakes(CACHES)
def test_mistakes_of_cache(call, answer):
    assert_refused(call, answer)


@mistakes(GENERATION)
def test_mistakes_of_generation(call, answer):
    assert_refused(call, answer)


def test_a_misspelt_argument_is_read_by_nobody():
    """As everywhere in transformers; `generate` refuses it."""
    assert torch.equal(model()(IDS, atention_mask=mask(2, 6) * 0).logits, model()(IDS).logits)
    assert_refused(generate(atention_mask=mask(2, 6)), "ValueError: atention_mask")


def test_a_row_of_padding_does_not_touch_the_others():
    beside = model()(IDS, mask(2, 6) * torch.tensor([[0], [1]])).logits[1]
    torch.testing.assert_close(beside, model()(IDS[1:]).logits[0])


def test_more_logits_to_keep_than_there_are_keep_all():
    assert model()(IDS, logits_to_keep=99).logits.shape[1] == IDS.shape[1]


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (None, "silently"),
        (KeyError("size=3 must be even"), "KeyError instead of ValueError"),
        (ValueError("bad value"), "the message lacks"),
    ],
)
def test_a_poor_answer_is_a_fault(error, found):
    def call():
        if error is not None:
            raise error

    with pytest.raises(AssertionError, match=found):
        assert_refused(call, "ValueError: size=3 must be even")
