"""Settings that cannot be meant are refused by name, recipe by recipe, before anything is read."""

import pytest
from _lib.documents import DataArguments
from compare import CompareArguments
from compare_lra import CompareLraArguments
from evaluate_lm import EvaluationArguments
from finetune_glue import GlueArguments
from finetune_summarization import SummarizationArguments
from first_token_recall import RecallArguments
from glue_baselines import BaselineArguments
from length_extrapolation import ExtrapolationArguments
from lm_eval_table import TableArguments
from lra import LraArguments
from mqar import MqarArguments
from per_token_loss import PerTokenArguments
from pretrain_clm import ModelArguments
from pretrain_mlm import MaskingArguments
from pretrain_seq2seq import SpanArguments
from rare_words import RareWordsArguments
from scaling_law import ScalingArguments
from upcycling_gaps import GapArguments
from word_lm import WordArguments

ENCODER = "checkpoints/spade-encoder-books"
GOOD = {
    BaselineArguments: {},
    CompareArguments: {"base": {}, "variants": {"a": {}, "b": {}}},
    CompareLraArguments: {"base": {}, "tasks": {"text": {}}, "variants": {"a": {}}},
    DataArguments: {"train_files": ["x"]},
    EvaluationArguments: {"model": "m", "files": ["x"]},
    ExtrapolationArguments: {"files": ["x"], "lengths": [16, 32], "scored_tokens": 256, "variants": {"a": {}}},
    GapArguments: {"base": {}, "variants": {"a": {}}, "files": {"b": ["c"]}},
    GlueArguments: {"model_type": "longhorn"},
    LraArguments: {"task": "text", "data_folder": "x", "model_type": "spade"},
    MaskingArguments: {"model_type": "spade"},
    ModelArguments: {"model_type": "longhorn"},
    MqarArguments: {"models": {"a": {"model_type": "longhorn"}}},
    PerTokenArguments: {"models": {}, "files": ["x"]},
    RareWordsArguments: {"models": {}, "files": ["x"], "train_files": ["x"]},
    RecallArguments: {"models": {"a": {"model_type": "llama"}}, "length": 12, "nearest": 4, "questions": 4},
    ScalingArguments: {"base": {}, "families": {"a": {"small": {}, "middle": {}, "large": {}}}},
    SpanArguments: {"model_type": "t5"},
    SummarizationArguments: {"train_files": ["x"], "model_type": "spade_seq2seq"},
    TableArguments: {},
    WordArguments: {"train_files": ["a"]},
}
BAD = [
    (BaselineArguments, {"tasks": ["sst3"]}, "tasks names .'sst3'"),
    (BaselineArguments, {"seeds": []}, r"seeds=\[\] must name at least one"),
    (BaselineArguments, {"probed": ["rte"], "encoder": ENCODER}, "probed=.'rte'. are tasks of two texts"),
    (CompareArguments, {"variants": {"a": {}}}, "variants=.'a'. must name at least two"),
    (CompareArguments, {"seeds": []}, r"seeds=\[\] must name at least one"),
    (CompareArguments, {"only": ["c"]}, "only names .'c'"),
    (CompareArguments, {"reference": "c"}, "reference='c' must be one of variants="),
    (CompareArguments, {"reference": "a", "only": ["b"]}, "reference='a' must be one of only="),
    (CompareArguments, {"learning_rates": [1e-3]}, "learning_rates are tried for search_steps=0"),
    (CompareLraArguments, {"seeds": []}, "seeds="),
    (CompareLraArguments, {"variants": {}}, "variants="),
    (CompareLraArguments, {"tasks": {}}, "tasks="),
    (DataArguments, {"train_files": []}, "either train_files or dataset_name"),
    (DataArguments, {"dataset_name": "y"}, "dataset_name='y'"),
    (DataArguments, {"sequence_length": 1}, "sequence_length=1 must be at least 2"),
    (DataArguments, {"validation_fraction": 1.0}, "validation_fraction=1.0"),
    (DataArguments, {"shuffle_buffer": 0}, "shuffle_buffer=0 must be at least 1"),
    (DataArguments, {"max_validation_rows": 0}, "max_validation_rows=0 must be at least 1"),
    (EvaluationArguments, {"length": 8, "stride": 8}, "stride=8 must lie between 1 and"),
    (EvaluationArguments, {"factors": [5, 1, 3]}, r"factors=\[1, 3, 5\]"),
    (ExtrapolationArguments, {"lengths": [16, 40]}, "divide the longest"),
    (ExtrapolationArguments, {"lengths": [16, 1024]}, "scored_tokens=256"),
    (ExtrapolationArguments, {"variants": {}}, "give models"),
    (ExtrapolationArguments, {"seeds": []}, "seeds="),
    (ExtrapolationArguments, {"read_as": {"llama": {}}}, "read_as names .'llama'"),
    (ExtrapolationArguments, {"models": {"a": ["/nowhere"]}}, "'/nowhere', but there is no such folder"),
    (GapArguments, {"reference": "b"}, r"reference='b' must be one of variants=\['a'\]"),
    (GapArguments, {"files": {}}, r"files=\{\} must map"),
    (GapArguments, {"files": ["c"]}, r"files=\['c'\] must map one kind of text or more"),
    (GapArguments, {"factor": 1}, "factor=1 must be at least 2"),
    (GapArguments, {"variants": {"a": {"intermediate_size": 8}}}, "'a' has an intermediate_size without teacher_goes"),
    (GlueArguments, {"tasks": ["wnli"]}, "tasks names .'wnli'"),
    (GlueArguments, {"model_type": None}, "either model_type or model_name_or_path"),
    (GlueArguments, {"model_name_or_path": "b"}, "model_name_or_path='b'"),
    (GlueArguments, {"pairs": "aside"}, "pairs='aside' must be 'together' or 'apart'"),
    (LraArguments, {"task": "chess"}, "task='chess'"),
    (LraArguments, {"model_type": "spate"}, "model_type='spate'"),
    (MaskingArguments, {"model_type": None}, "either model_type"),
    (MaskingArguments, {"masked_fraction": 0}, "masked_fraction=0"),
    (ModelArguments, {"model_type": None}, "either model_type"),
    (ModelArguments, {"model_type": "transfo-xl"}, "'transfo-xl' is not a family that transformers knows"),
    (MqarArguments, {"finalists": 0}, "finalists=0 must be at least 1"),
    *((MqarArguments, {name: []}, rf"{name}=\[\]") for name in ("seeds", "learning_rates", "options")),
    (MqarArguments, {"options": [{}, {"warm_up": 5}]}, r"options: \['warm_up'\] are not training arguments"),
    (MqarArguments, {"settings": [[64, 17]]}, "pairs=17"),
    (MqarArguments, {"settings": [[64, 0]]}, "pairs=0"),
    (MqarArguments, {"settings": [[64, 4]], "vocab_size": 8}, "vocab_size=8"),
    (MqarArguments, {"models": {"a": {}}}, "'a' names no model_type"),
    (PerTokenArguments, {"sequence_length": 3}, "sequence_length=3 must be at least 16"),
    (PerTokenArguments, {"models": {"a": ["./nowhere"]}}, "'./nowhere', but there is no such folder"),
    (RareWordsArguments, {"most": -1}, "most=-1 must be at least 0"),
    (RareWordsArguments, {"row_length": 4}, "row_length=4 must be at least 16"),
    (RareWordsArguments, {"distances": [1, 1]}, "distances=.* growing"),
    (RareWordsArguments, {"read_as": {"other": {}}}, "read_as names .*other"),
    (RareWordsArguments, {"models": {"tiny": "nowhere/at/all"}}, "nowhere/at/all"),
    (RecallArguments, {"nearest": 12}, "nearest=12"),
    (RecallArguments, {"questions": 9}, "questions=9"),
    (RecallArguments, {"answers": 0}, "answers=0 must be at least 1"),
    (RecallArguments, {"distances": []}, r"distances=\[\]"),
    (RecallArguments, {"distances": [0]}, r"distances=\[0\]"),
    (RecallArguments, {"seeds": []}, r"seeds=\[\]"),
    (RecallArguments, {"only": ["x"]}, "only names .'x'"),
    (RecallArguments, {"groups": {"a": ["x"]}}, "groups names .'x'"),
    (ScalingArguments, {"families": {"a": {"small": {}, "large": {}}}}, "at least 3"),
    (ScalingArguments, {"seeds": []}, "seeds="),
    (SpanArguments, {"model_type": None}, "either model_type"),
    (SpanArguments, {"noise_density": 0}, "noise_density=0"),
    (SpanArguments, {"mean_span_length": 0.5}, "mean_span_length=0.5"),
    (SummarizationArguments, {"model_type": None}, "either model_type or model_name_or_path"),
    (SummarizationArguments, {"dataset_name": "some/data"}, "either train_files or dataset_name"),
    (TableArguments, {"tasks": ["chess"]}, "tasks names .'chess'"),
    (TableArguments, {"limit": 0}, "limit=0 must be at least 1"),
    (TableArguments, {"data_folder": "/nowhere"}, "data_folder='/nowhere' holds no folder lm_eval_tasks"),
    (WordArguments, {"sequence_length": 8, "context": 8}, "context=8 must lie"),
    (WordArguments, {"train_files": []}, "either train_files or dataset_name"),
    (WordArguments, {"momentum": 1.0}, "momentum=1.0"),
]


@pytest.mark.parametrize(("kind", "wrong", "says"), BAD)
def test_a_wrong_setting_is_named(kind, wrong, says):
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        kind(**GOOD[kind] | wrong)
