"""Configurations with fields of a wrong type, out of range, or that do not fit each other; unknown presets."""

import math
import re

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

import hf_hybrid_ssm
from tests.reliability.refusals import assert_refused, mistakes
from tests.tiny_models import EVERY, class_with_loss, classes_of, config_of

NUMBER = (0, -1, "3", 2.5, None)
REAL = (-1.0, math.nan, math.inf, "0.1")
SIZE = (*REAL, 0.0)
CHOICE = ("nonsense", "", 7)
PROBABILITY = (-0.1, 1.0, math.nan, "0.1")
TRUTH = ("yes", 2, None)
# fmt: off
# values that no combination makes legal, and the fields that must refuse each of them, by family
BROKEN = {
    "longhorn": [
        (NUMBER, "hidden_size num_hidden_layers state_size expand conv_kernel vocab_size max_position_embeddings"),
        ((0, -1, 2.5, "large"), "time_step_rank"),
        ((0, -1, "3"), "mlp_intermediate_size"),
        (SIZE, "layer_norm_epsilon"),
        (REAL, "initializer_range"),
        (PROBABILITY, "attention_dropout"),
        (TRUTH, "use_bias use_conv_bias residual_in_fp32 tie_word_embeddings use_cache"),
        ((["mamba", "mamba", "mamba", "mamba"], [], "linear_attention", [0]), "block_types"),
        ((0, -2), "num_labels"),
    ],
    "bst": [
        (NUMBER, "hidden_size num_hidden_layers num_attention_heads head_dim sliding_window vocab_size"),
        (NUMBER, "intermediate_size num_context_states recurrent_num_states filter_length"),
        (CHOICE, "context_variant ssm_type ssm_init ssm_discretization hidden_act"),
        ((0, -2, 3, "4"), "ssm_state_size"),
        ((0, 3, -2, None), "relative_attention_num_buckets"),
        ((0, 1, "3"), "relative_attention_max_distance"),
        ((-1, "2"), "filter_inner_layers"),
        (SIZE, "filter_sin_freq ssm_learning_rate layer_norm_epsilon logit_scale"),
        (PROBABILITY, "dropout attention_dropout final_dropout"),
        (REAL, "initializer_range context_init_std context_id_std"),
        (TRUTH, "qk_norm attend_self zero_kv_sink bidirectional ssm_skip"),
        ((["mamba", "mamba", "mamba", "mamba"], [], "sliding_attention", [0]), "block_types"),
        (([7], [0, 0], [-1], ["a"], 0), "ssm_layers"),
        ((0, -1, 5000), "retrieval_k"),
    ],
    "lmu_isa": [
        (NUMBER, "hidden_size num_hidden_layers lmu_order post_intermediate_size vocab_size"),
        ((0, -1, 11, "1"), "lmu_reduced_order"),
        ((-1.0, math.nan, math.inf, "0.1", 0), "lmu_theta"),
        (SIZE, "attention_scale layer_norm_epsilon"),
        (CHOICE, "first_sublayer hidden_act"),
        (REAL, "initializer_range"),
        (PROBABILITY, "hidden_dropout attention_dropout"),
        (TRUTH, "use_bias tie_word_embeddings use_cache"),
    ],
    "spade": [
        (NUMBER, "hidden_size num_hidden_layers num_attention_heads intermediate_size sliding_window"),
        (NUMBER, "vocab_size chunk_size filter_length"),
        (CHOICE, "attention_type ssm_type ssm_trainable ssm_merge norm_type norm_position pooling"),
        (CHOICE, "relative_bias_scope hidden_act classifier_activation"),
        ((0, -2, "4"), "ssm_state_size"),
        (REAL, "ssm_merge_weight initializer_range"),
        ((0, 6, -4, None), "relative_attention_num_buckets"),
        ((0, 1, "9"), "relative_attention_max_distance"),
        (SIZE, "filter_sin_freq layer_norm_epsilon pixel_std"),
        (PROBABILITY, "dropout attention_dropout activation_dropout embedding_dropout adaptive_dropout"),
        (PROBABILITY, "classifier_dropout"),
        (TRUTH, "ssm_stop_gradient scale_embedding paired_input use_cache"),
        (([9], [0, 0], [-1], ["a"], 5, "all"), "ssm_layers"),
        (([], [0], [61], [40, 20], ["a"]), "adaptive_cutoffs"),
    ],
}
BROKEN["spade_seq2seq"] = [(values, names.replace("pixel_std", "").replace("paired_input", ""))
                           for values, names in BROKEN["spade"]] + [
    (NUMBER, "num_decoder_layers max_target_positions"),
    (CHOICE, "decoder_attention_type decoder_position_embedding_type"),
    (([9], [0, 0], [-1], "all"), "decoder_ssm_layers"),
    ((-1, 61, "0"), "decoder_start_token_id"),
    ((False, "yes"), "is_encoder_decoder"),
]
# variant -> fields that are wrong with the others or by themselves, and the words of the answer
REFUSED = {
    "longhorn": [
        ({"time_step_rank": "large"}, "time_step_rank='large' must be \"auto\" or a positive integer"),
        ({"time_step_rank": 0}, "time_step_rank=0 must be"),
        ({"eos_token_id": "</s>"}, "eos_token_id.*'</s>'"),
        ({"block_types": ["linear_attention"]}, "names 1 layers, but num_hidden_layers=3"),
        ({"block_types": ["mamba"] * 3}, r"block_types contains \['mamba'\].*'linear_attention'"),
    ],
    "longhorn + window and full attention": [
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be positive"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"sliding_window": -4}, "sliding_window=-4 must be positive"),
        ({"sliding_window": None}, "sliding_window=None, but .*give their window"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta.*-1.0.*positive"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral' is not one of"),
        ({"attn_implementation": "lightning"}, 'attn_implementation="lightning"` is not supported.*eager'),
    ],
    "bst sh s4d": [
        ({"ssm_state_size": 3}, "ssm_state_size=3 must be even"),
        ({"ssm_discretization": "euler"}, "ssm_discretization='euler' does not exist for ssm_type='s4d'"),
        ({"ssm_layers": [7]}, r"ssm_layers=\[7\] must name different layers from 0 to 2"),
        ({"ssm_layers": [0, 0]}, r"ssm_layers=\[0, 0\] must name different layers"),
        ({"ssm_layers": ["first"]}, "ssm_layers.*first"),
        ({"block_types": ["bst", "sliding_attention", "sliding_attention"]},
         r"ssm_layers=\[0, 2\] contradicts block_types"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets=3 must be a multiple of 2"),
        ({"relative_attention_max_distance": 2},
         "relative_attention_max_distance=2 must exceed half of relative_attention_num_buckets=8"),
        ({"retrieval_memory": 4}, "retrieval_memory=4 .* nothing without retrieval_k"),
        ({"retrieval_k": 9, "retrieval_memory": 4}, "retrieval_k=9 cannot exceed the retrieval_memory=4"),
        ({"retrieval_k": 2, "retrieval_stride": 7}, "retrieval_stride=7 would keep none of a block's 6"),
        ({"retrieval_k": 2, "ssm_layers": []}, "retrieval_k=2 needs 'bst' layers"),
        ({"bidirectional": True, "relative_attention_num_buckets": 6},
         "relative_attention_num_buckets=6 must be a multiple of 4"),
        ({"ssm_dt_min": 0.2}, "dt_min <= dt_max, got 0.2 and 0.1"),
        ({"ssm_num_dynamics": 5}, "num_dynamics must divide the 24 systems, got 5"),
    ],
    "bst mf unstructured": [
        ({"bidirectional": True}, "bidirectional=True has no meaning for context_variant='mf'"),
        ({"filter_hidden_size": 0}, "filter_hidden_size=0 must be positive"),
        ({"ssm_discretization": "zoh"}, "ssm_discretization='zoh' does not exist for ssm_type='unstructured'"),
        ({"filter_emb_dim": 4}, "filter_emb must be odd and at least 3.*got 4"),
        ({"filter_decay_target": 2.0}, r"0 < decay_target < 1, got 0\.3, 1\.5, 2\.0"),
    ],
    "lmu-isa + global attention": [
        ({"lmu_reduced_order": 11}, "lmu_reduced_order=11 must be at most lmu_order=10"),
        ({"num_attention_heads": 5}, "hidden_size=24 must be a multiple of num_attention_heads=5"),
        ({"num_attention_heads": None}, "num_attention_heads.*expected int, got NoneType"),
        ({"first_sublayer": "window_attention", "sliding_window": None}, "sliding_window=None.*give its window"),
    ],
    "spade s4 window": [
        ({"hidden_size": 25}, "hidden_size=25 must be a multiple of num_attention_heads=4"),
        ({"classifier_hidden_size": 0}, "classifier_hidden_size=0 must be positive"),
        ({"sliding_window": 0}, "sliding_window=0 must be"),
        ({"ssm_type": "lstm", "ssm_trainable": "output"}, "ssm_trainable='output' is not one of.*'lstm'"),
        ({"ssm_layers": [2]}, r"ssm_layers=\[2\] must be distinct layers from 0 to 1"),
        ({"ssm_layers": [0, 0]}, r"ssm_layers=\[0, 0\] must be distinct"),
        ({"ssm_layers": 5}, "ssm_layers.*5"),
        ({"relative_attention_num_buckets": 6}, "relative_attention_num_buckets=6 must be a multiple of 4"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance=16 must exceed half of .*=32"),
        ({"filter_hidden_size": 0}, "filter_hidden_size=0 must be positive"),
        ({"adaptive_cutoffs": [40, 20]}, r"adaptive_cutoffs=\[40, 20\] must rise"),
        ({"adaptive_cutoffs": [61]}, r"adaptive_cutoffs=\[61\] must rise from at least 1 to below vocab_size"),
        ({"adaptive_cutoffs": [20], "tie_word_embeddings": False}, "adaptive_cutoffs needs tie_word_embeddings=True"),
        ({"adaptive_cutoffs": [20], "adaptive_factor": 5}, "hidden_size=24 must be divisible by adaptive_factor"),
        ({"ssm_state_size": 7}, "ssm_state_size=7 must be even"),
        ({"ssm_type": "s5", "s5_blocks": 3}, "state_size must be a multiple of 2 blocks = 6, got 8"),
        ({"ssm_type": "hyena", "filter_emb_dim": 4}, "filter_emb must be odd.*got 4"),
        ({"ssm_type": "ema", "ema_activation": "tanh"}, "activation='tanh' must be 'silu' or None"),
        ({"pixel_input": True}, "pixel_input=True.* are for classification"),
        ({"paired_input": True}, "paired_input=True are for classification"),
    ],
    "encoder-decoder": [
        ({"decoder_ssm_layers": [5]}, r"decoder_ssm_layers=\[5\] must be distinct layers from 0 to 1"),
        ({"decoder_start_token_id": 61}, "decoder_start_token_id=61 must lie below vocab_size=61"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False contradicts SpadeSeq2SeqConfig"),
        ({"pixel_input": True}, "pixel_input.* belong to SpadeConfig"),
    ],
}
OTHERS = [
    (lambda: hf_hybrid_ssm.LonghornConfig.preset("125b"), "ValueError: no preset '125b'; it has '125m'"),
    (lambda: hf_hybrid_ssm.BstConfig.preset(200), "ValueError: no preset 200; it has '80m', '200m'"),
    (lambda: hf_hybrid_ssm.LmuIsaConfig.preset("spade-base"), "ValueError: no preset 'spade-base'"),
    (lambda: hf_hybrid_ssm.SpadeConfig.preset("spade-lm-wt103", num_attention_heads=3),
     "ValueError: hidden_size=1024 must be a multiple of num_attention_heads=3"),
    (lambda: AutoConfig.for_model("longhorm"), "ValueError: Unrecognized model identifier: longhorm"),
    (lambda: hf_hybrid_ssm.LonghornModel({"hidden_size": 24}),
     "Exception: LonghornModel needs a LonghornConfig, got dict"),
    (lambda: hf_hybrid_ssm.LonghornForCausalLM(config_of("bst sh s4d")),
     "TypeError: LonghornForCausalLM.*LonghornConfig.*got Bst"),
    (lambda: hf_hybrid_ssm.BstModel(config_of("longhorn")), "TypeError: BstModel.*BstConfig.*got LonghornConfig"),
    (lambda: hf_hybrid_ssm.LmuIsaForSequenceClassification(config_of("spade s4 window")),
     "TypeError: LmuIsaForSequenceClassification.*LmuIsaConfig.*got SpadeConfig"),
    (lambda: hf_hybrid_ssm.SpadeForConditionalGeneration(config_of("spade s4 window")),
     "TypeError: SpadeForConditionalGeneration.*SpadeSeq2SeqConfig.*got SpadeConfig"),
    (lambda: hf_hybrid_ssm.BstForCausalLM(config_of("bst s5 bidirectional")),
     "ValueError: BstForCausalLM needs bidirectional=False"),
]
# fmt: on
FIELDS = [(family, name) for family, groups in BROKEN.items() for _, names in groups for name in names.split()]


@pytest.mark.parametrize(("family", "field"), FIELDS)
def test_broken_fields(family, field):
    """Refused by the field's name, and by the value or its type."""
    variant = next(name for name, (model_type, _) in EVERY.items() if model_type == family)
    for value in next(values for values, names in BROKEN[family] if field in names.split()):
        told = refusal(variant, {field: value})
        assert field in told, f"{field}={value!r}: {told}"
        assert isinstance(value, list) or repr(value) in told or type(value).__name__ in told, (
            f"{field}={value!r}: {told}"
        )


def refusal(variant, fields):
    """What a configuration, or the model that is built from it, says to its fields."""
    with pytest.raises((ValueError, StrictDataclassError)) as raised:
        classes_of(variant)[class_with_loss(variant)](config_of(variant, **fields))
    return str(raised.value)


@pytest.mark.parametrize(("variant", "fields", "words"), [(name, *case) for name in REFUSED for case in REFUSED[name]])
def test_fields_that_do_not_fit(variant, fields, words):
    assert re.search(words, refusal(variant, fields), re.DOTALL)


@mistakes(OTHERS)
def test_other_mistakes(call, answer):
    assert_refused(call, answer)
