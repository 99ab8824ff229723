"""Inputs that no model can make sense of: ids, embeddings, masks, positions, documents, labels."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from transformers import DynamicCache

import hf_hybrid_ssm
from tests.reliability.misuses import Misuse
from tests.reliability.population import build, config_of

IDS = torch.arange(3, 15).view(2, 6)  # two rows of six tokens
TARGET = IDS[:, :4]
MIXED = "longhorn + window and full attention"  # one layer of each kind


@cache
def model(variant: str = MIXED, class_name: str = "LonghornForCausalLM", **fields):
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    if fields:
        return getattr(hf_hybrid_ssm, class_name)(config_of(variant, **fields)).eval()
    return build(variant, class_name)


def classifier():
    return model("longhorn", "LonghornForSequenceClassification")


def tagger():
    return model("spade s4 window", "SpadeForTokenClassification")


def reader():
    return model("bst sh s4d", "BstForQuestionAnswering")


def encoder_decoder():
    return model("encoder-decoder", "SpadeForConditionalGeneration")


def filled(variant: str = MIXED, class_name: str = "LonghornForCausalLM", **fields):
    """A model's cache after the two rows."""
    return model(variant, class_name, **fields)(IDS, use_cache=True).past_key_values


def mask(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.long)


# what is done, what is called, exception, words
Case = tuple[str, Callable[[], object], type[Exception], str]
LANGUAGE_MODEL: list[Case] = [
    (
        "neither input_ids nor inputs_embeds",
        lambda: model()(),
        ValueError,
        "exactly one of input_ids or inputs_embeds",
    ),
    (
        "both input_ids and inputs_embeds",
        lambda: model()(IDS, inputs_embeds=torch.zeros(2, 6, 24)),
        ValueError,
        "exactly one of input_ids or inputs_embeds",
    ),
    ("input_ids as a list", lambda: model()(IDS.tolist()), TypeError, "input_ids must be a tensor, got list"),
    ("input_ids of one dimension", lambda: model()(IDS[0]), ValueError, r"input_ids must have shape .*got \(6,\)"),
    ("input_ids of three dimensions", lambda: model()(IDS[None]), ValueError, r"input_ids .*got \(1, 2, 6\)"),
    ("input_ids without a token", lambda: model()(IDS[:, :0]), ValueError, r"input_ids .*length ≥ 1.*got \(2, 0\)"),
    ("input_ids of floats", lambda: model()(IDS.float()), TypeError, "input_ids must be int32 or int64.*float32"),
    ("input_ids of bools", lambda: model()(IDS > 5), TypeError, "input_ids must be int32 or int64.*bool"),
    ("an id beyond the vocabulary", lambda: model()(IDS + 50), ValueError, "input_ids has ids from 53 to 64.*is 61"),
    ("a negative id", lambda: model()(-IDS), ValueError, "input_ids has ids from -14 to -3.*vocab_size is 61"),
    (
        "inputs_embeds of another width",
        lambda: model()(inputs_embeds=torch.zeros(2, 6, 7)),
        ValueError,
        r"inputs_embeds must have shape \(batch ≥ 1, length ≥ 1, 24\), got \(2, 6, 7\)",
    ),
    (
        "inputs_embeds of integers",
        lambda: model()(inputs_embeds=torch.zeros(2, 6, 24, dtype=torch.long)),
        TypeError,
        "inputs_embeds must be floating point, got torch.int64",
    ),
    ("inputs_embeds as a list", lambda: model()(inputs_embeds=[[0.0]]), TypeError, "inputs_embeds .* got list"),
    ("attention_mask as a list", lambda: model()(IDS, [[1] * 6] * 2), TypeError, "attention_mask .* got list"),
    ("attention_mask too short", lambda: model()(IDS, mask(2, 5)), ValueError, r"attention_mask .*got \(2, 5\)"),
    ("attention_mask too long", lambda: model()(IDS, mask(2, 9)), ValueError, r"\(2, 6\), got \(2, 9\): 0 tokens"),
    ("attention_mask of other rows", lambda: model()(IDS, mask(3, 6)), ValueError, r"attention_mask .*got \(3, 6\)"),
    (
        "attention_mask of four dimensions",
        lambda: model()(IDS, mask(2, 6)[:, None, None]),
        ValueError,
        r"attention_mask .*got \(2, 1, 1, 6\)",
    ),
    (
        "an additive attention_mask",
        lambda: model()(IDS, torch.tensor([[0.0] * 6, [-1e9] * 3 + [0.0] * 3])),
        ValueError,
        "attention_mask must be 1 for text and 0 for padding.*additive",
    ),
    (
        "documents in the attention_mask",
        lambda: model()(IDS, torch.tensor([[1, 1, 1, 2, 2, 2]] * 2)),
        ValueError,
        "attention_mask must be 1 .*from 1 to 2; documents .* seq_idx",
    ),
    (
        "an attention_mask of NaN",
        lambda: model()(IDS, torch.full((2, 6), torch.nan)),
        ValueError,
        "attention_mask must be 1 .*nan",
    ),
    (
        "position_ids of another length",
        lambda: model()(IDS, position_ids=torch.arange(4)[None]),
        ValueError,
        r"position_ids must have shape .*\(2, 6\), got \(1, 4\)",
    ),
    (
        "position_ids of one dimension",
        lambda: model()(IDS, position_ids=torch.arange(6)),
        ValueError,
        r"position_ids .*got \(6,\)",
    ),
    (
        "position_ids of other rows",
        lambda: model()(IDS, position_ids=torch.arange(6).expand(3, 6)),
        ValueError,
        r"position_ids .*got \(3, 6\)",
    ),
    (
        "position_ids of floats",
        lambda: model()(IDS, position_ids=torch.arange(6.0)[None]),
        TypeError,
        "position_ids must be an int32 or int64 tensor, got torch.float32",
    ),
    ("seq_idx as a list", lambda: model()(IDS, seq_idx=[[0] * 6] * 2), TypeError, "seq_idx must be a tensor.*list"),
    (
        "seq_idx of floats",
        lambda: model()(IDS, seq_idx=torch.zeros(2, 6)),
        TypeError,
        "seq_idx must be int32 or int64",
    ),
    (
        "seq_idx of another length",
        lambda: model()(IDS, seq_idx=mask(2, 4)),
        ValueError,
        r"seq_idx must have shape .*\(2, 6\), got \(2, 4\)",
    ),
    (
        "seq_idx that goes back to an earlier document",
        lambda: model()(IDS, seq_idx=torch.tensor([[0, 0, 1, 1, 0, 0]] * 2)),
        ValueError,
        "seq_idx must not decrease",
    ),
    ("labels as a list", lambda: model()(IDS, labels=IDS.tolist()), TypeError, "labels must be a tensor.*list"),
    ("labels of floats", lambda: model()(IDS, labels=IDS.float()), TypeError, "labels must be int32 or int64"),
    (
        "labels shorter than the input",
        lambda: model()(IDS, labels=IDS[:, 1:]),
        ValueError,
        r"labels must have the input's shape .*\(2, 6\), got \(2, 5\)",
    ),
    ("labels of one row", lambda: model()(IDS, labels=IDS[:1]), ValueError, r"labels .*got \(1, 6\)"),
    ("labels made flat", lambda: model()(IDS, labels=IDS.flatten()), ValueError, r"labels .*got \(12,\)"),
    (
        "labels beyond the vocabulary",
        lambda: model()(IDS, labels=IDS + 50),
        ValueError,
        "labels has ids from 53 to 64",
    ),
    (
        "labels of -1 for no target",
        lambda: model()(IDS, labels=0 * IDS - 1),
        ValueError,
        "labels has ids from -1 to -1",
    ),
    ("negative logits_to_keep", lambda: model()(IDS, logits_to_keep=-2), ValueError, "logits_to_keep=-2 must be"),
    (
        "input_ids beyond the bands of an adaptive vocabulary",
        lambda: model("spade adaptive", "SpadeForCausalLM")(IDS + 60),
        ValueError,
        "input_ids has ids from 63 to 74.*vocab_size is 61",
    ),
]
CLASSIFIER: list[Case] = [
    ("labels as a list", lambda: classifier()(IDS, labels=[0, 1]), TypeError, "labels must be a tensor, got list"),
    (
        "a class that does not exist",
        lambda: classifier()(IDS, labels=torch.tensor([0, 7])),
        ValueError,
        r"labels has classes from 0 to 7, but num_labels=2",
    ),
    (
        "a negative class",
        lambda: classifier()(IDS, labels=torch.tensor([0, -2])),
        ValueError,
        "labels has classes from -2 to 0",
    ),
    (
        "labels for fewer rows",
        lambda: classifier()(IDS, labels=torch.tensor([0])),
        ValueError,
        r"labels must have shape \(batch,\) = \(2,\), got \(1,\)",
    ),
    ("labels for each token", lambda: classifier()(IDS, labels=IDS), ValueError, r"labels .*\(2,\), got \(2, 6\)"),
    (
        "several labels a row of the wrong number",
        lambda: classifier()(IDS, labels=torch.zeros(2, 3)),
        ValueError,
        r"labels must have shape \(batch, num_labels\) = \(2, 2\).*got \(2, 3\)",
    ),
    (
        "class indices of floats",
        lambda: model("longhorn", "LonghornForSequenceClassification", problem_type="single_label_classification")(
            IDS, labels=torch.tensor([0.0, 1.0])
        ),
        TypeError,
        "labels must be int32 or int64 class indices.*float32",
    ),
    (
        "a bidirectional classifier's class that does not exist",
        lambda: model("spade s4 window", "SpadeForSequenceClassification")(IDS, labels=torch.tensor([2, 0])),
        ValueError,
        "labels has classes from 0 to 2, but num_labels=2",
    ),
    (
        "several rows and nothing that tells padding",
        lambda: model("longhorn", "LonghornForSequenceClassification", pad_token_id=None)(IDS),
        ValueError,
        "needs an attention_mask or config.pad_token_id",
    ),
    (
        "one text where two are compared",
        lambda: model("spade s4 window", "SpadeForSequenceClassification", paired_input=True)(IDS),
        ValueError,
        r"input_ids must have shape \(batch, 2, length\) with paired_input=True, got \(2, 6\)",
    ),
]
TAGGER: list[Case] = [
    ("labels as a list", lambda: tagger()(IDS, labels=IDS.tolist()), TypeError, "labels must be an int.*got list"),
    ("labels of floats", lambda: tagger()(IDS, labels=IDS.float()), TypeError, "labels must be an int.*float32"),
    (
        "labels of rows",
        lambda: tagger()(IDS, labels=IDS[:, 0]),
        ValueError,
        r"labels must have .*\(2, 6\), got \(2,\)",
    ),
    (
        "a class that does not exist",
        lambda: tagger()(IDS, labels=IDS % 3),
        ValueError,
        "labels has classes from 0 to 2, but num_labels=2",
    ),
]
SPANS: list[Case] = [
    (
        "a start without an end",
        lambda: reader()(IDS, start_positions=torch.tensor([0, 1])),
        ValueError,
        "end_positions is missing",
    ),
    (
        "ends for fewer rows",
        lambda: reader()(IDS, start_positions=torch.tensor([0, 1]), end_positions=torch.tensor([2])),
        ValueError,
        r"end_positions must have shape \(batch,\) = \(2,\), got \(1,\)",
    ),
    (
        "-1 for no answer",
        lambda: reader()(IDS, start_positions=torch.tensor([0, -1]), end_positions=torch.tensor([0, -1])),
        ValueError,
        "start_positions must be at least 0, got -1",
    ),
    (
        "positions of floats",
        lambda: reader()(IDS, start_positions=torch.zeros(2), end_positions=torch.zeros(2)),
        TypeError,
        "start_positions must be an int32 or int64 tensor, got torch.float32",
    ),
]
ENCODER_DECODER: list[Case] = [
    (
        "no target",
        lambda: encoder_decoder()(IDS),
        ValueError,
        "exactly one of decoder_input_ids or decoder_inputs_emb",
    ),
    ("no source", lambda: encoder_decoder()(decoder_input_ids=TARGET), ValueError, "exactly one of input_ids"),
    (
        "a target of other rows",
        lambda: encoder_decoder()(IDS, decoder_input_ids=TARGET[:1]),
        ValueError,
        "decoder_input_ids has a batch of 1, but the encoder's input has one of 2",
    ),
    (
        "a target id beyond the vocabulary",
        lambda: encoder_decoder()(IDS, decoder_input_ids=TARGET + 60),
        ValueError,
        "decoder_input_ids has ids from 63 to",
    ),
    (
        "a target longer than the learned positions",
        lambda: encoder_decoder()(IDS, decoder_input_ids=torch.full((2, 65), 5)),
        ValueError,
        "65 tokens, but max_target_positions=64",
    ),
    (
        "a source mask of another length",
        lambda: encoder_decoder()(IDS, mask(2, 5), decoder_input_ids=TARGET),
        ValueError,
        r"attention_mask must have .*got \(2, 5\)",
    ),
    (
        "a target mask of another length",
        lambda: encoder_decoder()(IDS, decoder_input_ids=TARGET, decoder_attention_mask=mask(2, 3)),
        ValueError,
        r"decoder_attention_mask must have .*got \(2, 3\)",
    ),
    (
        "encoder_outputs that are no tensors",
        lambda: encoder_decoder()(encoder_outputs="states", decoder_input_ids=TARGET),
        TypeError,
        r"encoder_outputs\[0\] must be a tensor of shape .*got str",
    ),
    (
        "encoder_outputs of another width",
        lambda: encoder_decoder()(encoder_outputs=(torch.zeros(2, 5, 7),), decoder_input_ids=TARGET),
        ValueError,
        r"encoder_outputs\[0\] must have shape .*24\), got \(2, 5, 7\)",
    ),
    (
        "labels of another shape than the target",
        lambda: encoder_decoder()(IDS, decoder_input_ids=TARGET, labels=IDS),
        ValueError,
        r"labels must have .*\(2, 4\), got \(2, 6\)",
    ),
    (
        "labels of one dimension",
        lambda: encoder_decoder()(IDS, labels=IDS[0]),
        ValueError,
        r"labels must have shape \(batch, length\).*got \(6,\)",
    ),
    (
        "labels without a start token in the configuration",
        lambda: model("encoder-decoder", "SpadeForConditionalGeneration", decoder_start_token_id=None)(
            IDS, labels=IDS
        ),
        ValueError,
        "decoder_start_token_id=None and pad_token_id=0 .* must both be set",
    ),
    (
        "the cache of a model without encoder",
        lambda: encoder_decoder()(
            IDS, decoder_input_ids=TARGET, past_key_values=DynamicCache(config=encoder_decoder().config)
        ),
        TypeError,
        "past_key_values must be an EncoderDecoderCache, got DynamicCache",
    ),
    (
        "the cache of other rows",
        lambda: encoder_decoder()(
            IDS[:1],
            decoder_input_ids=TARGET[:1],
            past_key_values=encoder_decoder()(IDS, decoder_input_ids=TARGET, use_cache=True).past_key_values,
        ),
        ValueError,
        "past_key_values holds a batch of 2 .*batch of 1",
    ),
]


def misuse(part: str, case: Case) -> Misuse:
    """The registry's form of a case."""
    done, call, error, words = case

    def provoke(folder: Path) -> None:
        call()

    return Misuse(part, done, provoke, (error,), words)


MISUSES = [
    misuse(part, case)
    for part, cases in (
        ("language model", LANGUAGE_MODEL),
        ("classifier", CLASSIFIER),
        ("token classifier", TAGGER),
        ("question answering", SPANS),
        ("encoder-decoder", ENCODER_DECODER),
    )
    for case in cases
]
