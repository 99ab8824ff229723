"""Inputs, caches and settings that a model can make nothing of.

Rows of a table are arguments in place of good ones and the answer. What each family's own inputs, each op and each
mixer refuse is also in tests/models, tests/ops and tests/layers; illegal steps between legal ones are in
tests/programs.
"""

from functools import cache

import torch
from transformers import DynamicCache, EncoderDecoderCache

from hf_hybrid_ssm.training.segments import carry_segment
from tests.reliability.refusals import assert_refused, mistakes
from tests.tiny_models import build, class_with_loss, classes_of, config_of

IDS = torch.arange(3, 15).view(2, 6)  # two rows of six tokens
TARGET = IDS[:, :4]
MIXED = "longhorn + window and full attention"  # one layer of each kind


@cache
def model(variant: str = MIXED, class_name: str | None = None, **fields):
    """One for all callers; with fields of its own as it is initialised."""
    name = class_name or class_with_loss(variant)
    return classes_of(variant)[name](config_of(variant, **fields)).eval() if fields else build(variant, name)


def filled(variant: str = MIXED, **fields):
    """A model's cache after the two rows."""
    return model(variant, **fields)(IDS, use_cache=True).past_key_values


def mask(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.long)


# -- arguments of a forward -----------------------------------------------------------------------------------------

LANGUAGE_MODEL = [
    ({"input_ids": IDS.tolist()}, "TypeError: input_ids must be a tensor, got list"),
    ({"input_ids": IDS[0]}, r"ValueError: input_ids must have shape .*got \(6,\)"),
    ({"input_ids": IDS[None]}, r"ValueError: input_ids .*got \(1, 2, 6\)"),
    ({"input_ids": IDS > 5}, "TypeError: input_ids must be int32 or int64.*bool"),
    ({"input_ids": -IDS}, "ValueError: input_ids has ids from -14 to -3.*vocab_size is 61"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(2, 6, 24).long()}, "TypeError: inputs_embeds must be floating"),
    ({"input_ids": None, "inputs_embeds": [[0.0]]}, "TypeError: inputs_embeds .* got list"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(2, 6, 7)}, r"ValueError: inputs_embeds must have .*\(2, 6, 7\)"),
    ({"inputs_embeds": torch.zeros(2, 6, 24)}, "ValueError: exactly one of input_ids"),
    ({"attention_mask": [[1] * 6] * 2}, "TypeError: attention_mask .* got list"),
    ({"attention_mask": mask(2, 9)}, r"ValueError: \(2, 6\), got \(2, 9\): 0 tokens"),
    ({"attention_mask": mask(2, 6)[:, None, None]}, r"ValueError: attention_mask .*got \(2, 1, 1, 6\)"),
    ({"attention_mask": torch.tensor([[0.0] * 6, [-1e9] * 6])}, "ValueError: attention_mask must be 1 for.*additive"),
    ({"attention_mask": mask(2, 6) * 2}, "ValueError: attention_mask must be 1 .*documents .* seq_idx"),
    ({"attention_mask": torch.full((2, 6), torch.nan)}, "ValueError: attention_mask must be 1 .*nan"),
    ({"position_ids": torch.arange(6)}, r"ValueError: position_ids .*got \(6,\)"),
    ({"position_ids": torch.arange(6).expand(3, 6)}, r"ValueError: position_ids .*got \(3, 6\)"),
    ({"position_ids": torch.arange(6.0)[None]}, "TypeError: position_ids must be an int32 or int64 .*float32"),
    ({"seq_idx": [[0] * 6] * 2}, "TypeError: seq_idx must be a tensor.*list"),
    ({"seq_idx": torch.zeros(2, 6)}, "TypeError: seq_idx must be int32 or int64"),
    ({"labels": IDS.tolist()}, "TypeError: labels must be a tensor.*list"),
    ({"labels": IDS.float()}, "TypeError: labels must be int32 or int64"),
    ({"labels": IDS[:, 1:]}, r"ValueError: labels must have the input's shape .*\(2, 6\), got \(2, 5\)"),
    ({"labels": 0 * IDS - 1}, "ValueError: labels has ids from -1 to -1"),
    ({"logits_to_keep": -2}, "ValueError: logits_to_keep=-2 must be"),
    ({"atention_mask": mask(2, 6)}, "TypeError: has no argument 'atention_mask'. Did you mean 'attention_mask'"),
    ({"cache": EncoderDecoderCache(DynamicCache(), DynamicCache())}, "TypeError: got EncoderDecoderCache"),
]
CLASSIFIER = [
    ({"labels": [0, 1]}, "TypeError: labels must be a tensor, got list"),
    ({"labels": torch.tensor([0, 7])}, r"ValueError: labels has classes from 0 to 7, but num_labels=2"),
    ({"labels": torch.tensor([0, -2])}, "ValueError: labels has classes from -2 to 0"),
    ({"labels": torch.tensor([0])}, r"ValueError: labels must have shape \(batch,\) = \(2,\), got \(1,\)"),
    ({"labels": IDS}, r"ValueError: labels .*\(2,\), got \(2, 6\)"),
    ({"labels": torch.zeros(2, 3)}, r"ValueError: labels must have shape \(batch, num_labels\) = \(2, 2\).*\(2, 3\)"),
]
TAGGER = [
    ({"labels": IDS.tolist()}, "TypeError: labels must be an int.*got list"),
    ({"labels": IDS.float()}, "TypeError: labels must be an int.*float32"),
    ({"labels": IDS[:, 0]}, r"ValueError: labels must have .*\(2, 6\), got \(2,\)"),
    ({"labels": IDS % 3}, "ValueError: labels has classes from 0 to 2, but num_labels=2"),
]
ZERO = torch.zeros(2, dtype=torch.long)
READER = [
    ({"start_positions": ZERO}, "ValueError: end_positions is missing"),
    (
        {"start_positions": ZERO, "end_positions": ZERO[:1]},
        r"ValueError: end_positions must have .*\(2,\), got \(1,\)",
    ),
    ({"start_positions": ZERO - 1, "end_positions": ZERO}, "ValueError: start_positions must be at least 0, got -1"),
    ({"start_positions": ZERO.float(), "end_positions": ZERO}, "TypeError: start_positions must be an int.*float32"),
]
NARROW = torch.zeros(2, 5, 7)
ENCODER_DECODER = [
    ({"decoder_input_ids": None}, "ValueError: exactly one of decoder_input_ids or decoder_inputs_emb"),
    ({"input_ids": None}, "ValueError: exactly one of input_ids"),
    ({"decoder_input_ids": TARGET[:1]}, "ValueError: decoder_input_ids has a batch of 1, but the encoder's .* of 2"),
    ({"decoder_input_ids": TARGET + 60}, "ValueError: decoder_input_ids has ids from 63 to"),
    ({"decoder_attention_mask": mask(2, 3)}, r"ValueError: decoder_attention_mask must have .*got \(2, 3\)"),
    ({"input_ids": None, "encoder_outputs": "states"}, r"TypeError: encoder_outputs\[0\] must be a tensor .*got str"),
    ({"input_ids": None, "encoder_outputs": (NARROW,)}, r"ValueError: encoder_outputs\[0\] .*24\), got \(2, 5, 7\)"),
    ({"labels": IDS}, r"ValueError: labels must have .*\(2, 4\), got \(2, 6\)"),
    ({"decoder_input_ids": None, "labels": IDS[0]}, r"ValueError: labels must have shape .*length\).*got \(6,\)"),
    ({"cache": DynamicCache()}, "TypeError: must be an EncoderDecoderCache, got DynamicCache"),
]
HEADS = {
    (MIXED, "LonghornForCausalLM"): LANGUAGE_MODEL,
    ("longhorn", "LonghornForSequenceClassification"): CLASSIFIER,
    ("spade s4 window", "SpadeForTokenClassification"): TAGGER,
    ("bst sh s4d", "BstForQuestionAnswering"): READER,
    ("encoder-decoder", "SpadeForConditionalGeneration"): ENCODER_DECODER,
}


@mistakes([(*head, *row) for head, table in HEADS.items() for row in table], "variant, name, wrong, answer")
def test_arguments(variant, name, wrong, answer):
    right = {"input_ids": IDS} | ({"decoder_input_ids": TARGET} if variant == "encoder-decoder" else {})
    assert_refused(lambda: model(variant, name)(**right | wrong), answer)


# -- caches and settings of generation ------------------------------------------------------------------------------

CACHES = [  # a model, the cache it is given, the answer
    (MIXED, lambda: filled("longhorn"), "ValueError: cache has layers .*which are not those of this model"),
    ("bst sh s4d", lambda: filled("longhorn"), "ValueError: filled by a model of the family 'longhorn'.*'bst'"),
    ("longhorn", lambda: filled("bst sh s4d"), "ValueError: filled by a model of the family 'bst'.*'longhorn'"),
    ("lmu-isa", lambda: filled("spade s4 window"), "ValueError: filled by a model of the family 'spade'.*'lmu_isa'"),
    ("spade s4 window", lambda: filled("lmu-isa"), "ValueError: filled by a model of the family 'lmu_isa'.*'spade'"),
    ("longhorn", lambda: filled("longhorn", hidden_size=32), r"ValueError: initial_state .*48\), got \(2, 3, 64\)"),
    ("bst sh s4d", lambda: filled("bst mh s4"), "ValueError: state must have shape"),
    ("bst s5 bidirectional", DynamicCache, "ValueError: cache cannot be used with a bidirectional BstModel"),
]


@mistakes(CACHES, "variant, past, answer")
def test_caches(variant, past, answer):
    assert_refused(lambda: model(variant)(IDS, past_key_values=past()), answer)


def classify(**fields):
    head = model("longhorn", "LonghornForSequenceClassification", **fields)
    return head(IDS, labels=torch.tensor([0.0, 1.0]))


def generate(variant=MIXED, name=None, **settings):
    given = {"inputs": IDS, "max_new_tokens": 2, "do_sample": False, **settings}
    return lambda: model(variant, name).generate(**given)


BEGINS, NO_KEYS = torch.tensor([True, False]), torch.zeros(2, 1, 1, 8)
ONE_CLASS = {"problem_type": "single_label_classification"}
OTHERS = [
    (lambda: classify(**ONE_CLASS), "TypeError: labels must be int32 or int64 class indices.*float32"),
    (lambda: classify(pad_token_id=None), "ValueError: needs an attention_mask or config.pad_token_id"),
    (
        lambda: model("encoder-decoder", decoder_start_token_id=None)(IDS, labels=IDS),
        "ValueError: decoder_start_token_id=None and pad_token_id=0 .* must both be set",
    ),
    (lambda: carry_segment(filled(), BEGINS), "ValueError: layer 2 of cache is a DynamicLayer"),
    (
        lambda: carry_segment(filled("longhorn"), BEGINS[:1]),
        r"ValueError: begins must be bool of shape \(batch,\) = \(2,\)",
    ),
    (lambda: filled("longhorn").update(NO_KEYS, NO_KEYS, 0), "TypeError: a RecurrentStateLayer holds no keys and val"),
    (generate(inputs=IDS + 50), "ValueError: input_ids has ids from 53 to 64"),
    (generate(attention_mask=mask(2, 9).tril(7)), r"ValueError: attention_mask .*got \(2, 9\)"),
    (generate(attention_mask=torch.full((2, 6), -1e9)), "ValueError: attention_mask must be 1 for text.*additive"),
    (generate(atention_mask=mask(2, 6)), "ValueError: atention_mask"),
    (lambda: generate(inputs=IDS[:, :3], past_key_values=filled())(), "ValueError: input_ids must have shape"),
    (generate("encoder-decoder", max_new_tokens=99, min_new_tokens=99), "ValueError: 65 tokens, but max_target_pos"),
    (generate("longhorn", "LonghornModel"), "AttributeError: 'LonghornModel' object has no attribute 'generate'"),
]


@mistakes(OTHERS)
def test_other_mistakes(call, answer):
    assert_refused(call, answer)


def test_what_is_legal_though_it_looks_wrong():
    """A row of padding is left alone."""
    assert model()(IDS, logits_to_keep=99).logits.shape[1] == IDS.shape[1]
    beside = model()(IDS, mask(2, 6) * torch.tensor([[0], [1]])).logits[1]
    torch.testing.assert_close(beside, model()(IDS[1:]).logits[0])
