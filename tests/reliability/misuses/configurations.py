"""Configurations with fields of a wrong type, out of range, or that do not fit each other; unknown presets."""

import math
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

import hf_hybrid_ssm
from tests.reliability.misuses import Misuse
from tests.reliability.population import classes_of, config_of

REFUSALS = (ValueError, StrictDataclassError)
WRONG = "must be positive"
PROBABILITY = r"must lie in \[0, 1\)"
ATTENTION = "longhorn + window and full attention"
FILTER = "bst mf unstructured"
# variant → the fields that are wrong, and the words of the answer
REFUSED: dict[str, list[tuple[dict, str]]] = {
    "longhorn": [
        ({"hidden_size": "64"}, "hidden_size.*expected int, got str"),
        ({"hidden_size": 24.0}, "hidden_size.*expected int, got float"),
        ({"hidden_size": True}, "hidden_size.*expected int, got bool"),
        ({"hidden_size": 0}, f"hidden_size=0 {WRONG}"),
        ({"vocab_size": -3}, f"vocab_size=-3 {WRONG}"),
        ({"num_hidden_layers": 0}, f"num_hidden_layers=0 {WRONG}"),
        ({"state_size": -1}, f"state_size=-1 {WRONG}"),
        ({"expand": 0}, f"expand=0 {WRONG}"),
        ({"conv_kernel": 0}, f"conv_kernel=0 {WRONG}"),
        ({"time_step_rank": "large"}, "time_step_rank='large' must be \"auto\" or a positive integer"),
        ({"time_step_rank": 0}, "time_step_rank=0 must be"),
        ({"layer_norm_epsilon": math.nan}, f"layer_norm_epsilon=nan {WRONG}"),
        ({"initializer_range": -1.0}, "initializer_range=-1.0 must be at least 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings.*expected bool, got str"),
        ({"eos_token_id": "</s>"}, "eos_token_id.*'</s>'"),
        ({"num_labels": 0}, f"num_labels=0 {WRONG}"),
        ({"block_types": ["linear_attention"]}, "names 1 layers, but num_hidden_layers=3"),
        ({"block_types": ["mamba"] * 3}, r"block_types contains \['mamba'\].*'linear_attention'"),
    ],
    ATTENTION: [
        ({"num_attention_heads": 0}, f"num_attention_heads=0 {WRONG}"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"sliding_window": -4}, f"sliding_window=-4 {WRONG}"),
        ({"sliding_window": None}, "sliding_window=None, but .*give their window"),
        ({"attention_dropout": 1.5}, f"attention_dropout=1.5 {PROBABILITY}"),
        ({"mlp_intermediate_size": 0}, f"mlp_intermediate_size=0 {WRONG}"),
        ({"max_position_embeddings": 0}, f"max_position_embeddings=0 {WRONG}"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta.*-1.0.*positive"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral' is not one of"),
    ],
    "bst sh s4d": [
        ({"hidden_act": "rellu"}, "hidden_act='rellu' is no activation.*'relu'"),
        ({"sliding_window": 0}, f"sliding_window=0 {WRONG}"),
        ({"head_dim": -8}, f"head_dim=-8 {WRONG}"),
        ({"context_variant": "hm"}, "context_variant='hm' is not one of 'sh', 'mh', 'mf'"),
        ({"ssm_type": "mamba"}, "ssm_type='mamba' is not one of 's4'"),
        ({"ssm_init": "hippo"}, "ssm_init='hippo' is not one of 'legs', 'inv', 'lin'"),
        ({"ssm_state_size": 3}, "ssm_state_size=3 must be even"),
        ({"ssm_discretization": "euler"}, "ssm_discretization='euler' does not exist for ssm_type='s4d'"),
        ({"ssm_learning_rate": -1.0}, f"ssm_learning_rate=-1.0 {WRONG}"),
        ({"ssm_layers": [7]}, r"ssm_layers=\[7\] must name different layers from 0 to 2"),
        ({"ssm_layers": [0, 0]}, r"ssm_layers=\[0, 0\] must name different layers"),
        ({"ssm_layers": ["first"]}, "ssm_layers.*first"),
        (
            {"block_types": ["bst", "sliding_attention", "sliding_attention"]},
            r"ssm_layers=\[0, 2\] contradicts block_types",
        ),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets=3 must be even"),
        (
            {"relative_attention_max_distance": 2},
            "relative_attention_max_distance=2 must exceed half of relative_attention_num_buckets=8",
        ),
        ({"dropout": 1.0}, f"dropout=1.0 {PROBABILITY}"),
        ({"final_dropout": math.nan}, f"final_dropout=nan {PROBABILITY}"),
        ({"initializer_range": -1.0}, "initializer_range=-1.0 must be at least 0"),
        ({"logit_scale": math.nan}, f"logit_scale=nan {WRONG}"),
        ({"retrieval_k": 0}, f"retrieval_k=0 {WRONG}"),
        ({"retrieval_memory": 4}, "retrieval_memory=4 .* nothing without retrieval_k"),
        ({"retrieval_k": 9, "retrieval_memory": 4}, "retrieval_k=9 cannot exceed the retrieval_memory=4"),
        ({"retrieval_k": 2, "retrieval_stride": 7}, "retrieval_stride=7 would keep none of a block's 6"),
        ({"retrieval_k": 2, "ssm_layers": []}, "retrieval_k=2 needs 'bst' layers"),
        (
            {"bidirectional": True, "relative_attention_num_buckets": 6},
            "relative_attention_num_buckets=6 must be a multiple of 4",
        ),
    ],
    FILTER: [
        ({"bidirectional": True}, "bidirectional=True has no meaning for context_variant='mf'"),
        ({"filter_length": 0}, f"filter_length=0 {WRONG}"),
        ({"filter_hidden_size": 0}, f"filter_hidden_size=0 {WRONG}"),
        ({"filter_inner_layers": -1}, "filter_inner_layers=-1 must be at least 0"),
        ({"filter_sin_freq": math.inf}, f"filter_sin_freq=inf {WRONG} and finite"),
        ({"ssm_discretization": "zoh"}, "ssm_discretization='zoh' does not exist for ssm_type='unstructured'"),
    ],
    "lmu-isa + global attention": [
        ({"hidden_act": "swoosh"}, "hidden_act='swoosh' is no activation"),
        ({"lmu_order": 0}, f"lmu_order=0 {WRONG}"),
        ({"lmu_reduced_order": 11}, "lmu_reduced_order=11 must be at most lmu_order=10"),
        ({"lmu_theta": 0}, f"lmu_theta=0 {WRONG}"),
        ({"lmu_theta": math.inf}, f"lmu_theta=inf {WRONG} and finite"),
        ({"lmu_theta": math.nan}, f"lmu_theta=nan {WRONG}"),
        ({"attention_scale": 0.0}, f"attention_scale=0.0 {WRONG}"),
        ({"first_sublayer": "conv"}, "first_sublayer='conv' is not one of 'ffn'"),
        ({"num_attention_heads": 5}, "hidden_size=24 must be a multiple of num_attention_heads=5"),
        ({"num_attention_heads": None}, "num_attention_heads.*expected int, got NoneType"),
        ({"hidden_dropout": 2}, f"hidden_dropout=2 {PROBABILITY}"),
        ({"attention_dropout": -1.0}, f"attention_dropout=-1.0 {PROBABILITY}"),
        ({"layer_norm_epsilon": 0.0}, f"layer_norm_epsilon=0.0 {WRONG}"),
        ({"first_sublayer": "window_attention", "sliding_window": None}, "sliding_window=None.*give its window"),
    ],
    "spade s4 window": [
        ({"hidden_size": 25}, "hidden_size=25 must be a multiple of num_attention_heads=4"),
        ({"hidden_act": ""}, "hidden_act='' is no activation"),
        ({"classifier_activation": "step"}, "classifier_activation='step' is no activation"),
        ({"classifier_hidden_size": 0}, f"classifier_hidden_size=0 {WRONG}"),
        ({"attention_type": "strided"}, "attention_type='strided' is not one of 'window'"),
        ({"sliding_window": 0}, "sliding_window=0 must be"),
        ({"chunk_size": -1}, f"chunk_size=-1 {WRONG}"),
        ({"ssm_type": "s6"}, "ssm_type='s6' is not one of 's4'"),
        ({"ssm_trainable": "half"}, "ssm_trainable='half' is not one of 'all', 'output', 'none'"),
        ({"ssm_type": "lstm", "ssm_trainable": "output"}, "ssm_trainable='output'.*'lstm'"),
        ({"ssm_merge": "mul"}, "ssm_merge='mul' is not one of 'concat'"),
        ({"ssm_merge_weight": math.nan}, "ssm_merge_weight=nan must be at least 0"),
        ({"ssm_layers": [2]}, r"ssm_layers=\[2\] must be distinct layers from 0 to 1"),
        ({"ssm_layers": [0, 0]}, r"ssm_layers=\[0, 0\] must be distinct"),
        ({"ssm_layers": 5}, "ssm_layers.*5"),
        ({"relative_attention_num_buckets": 6}, "relative_attention_num_buckets=6 must be a multiple of 4"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance=16 must exceed half of .*=32"),
        ({"relative_bias_scope": "all"}, "relative_bias_scope='all' is not one of 'shared'"),
        ({"norm_position": "mid"}, "norm_position='mid' is not one of 'pre', 'post'"),
        ({"norm_type": "rms"}, "norm_type='rms' is not one of 'layernorm'"),
        ({"pooling": "max"}, "pooling='max' is not one of 'first', 'mean'"),
        ({"embedding_dropout": -0.1}, f"embedding_dropout=-0.1 {PROBABILITY}"),
        ({"adaptive_dropout": 3.0}, f"adaptive_dropout=3.0 {PROBABILITY}"),
        ({"filter_hidden_size": 0}, f"filter_hidden_size=0 {WRONG}"),
        ({"pixel_std": 0.0}, f"pixel_std=0.0 {WRONG}"),
        ({"adaptive_cutoffs": [40, 20]}, r"adaptive_cutoffs=\[40, 20\] must rise"),
        ({"adaptive_cutoffs": [61]}, r"adaptive_cutoffs=\[61\] must rise from at least 1 to below vocab_size"),
        ({"adaptive_cutoffs": [20], "tie_word_embeddings": False}, "adaptive_cutoffs needs tie_word_embeddings=True"),
        ({"adaptive_cutoffs": [20], "adaptive_factor": 5}, "hidden_size=24 must be divisible by adaptive_factor"),
    ],
    "encoder-decoder": [
        ({"num_decoder_layers": 0}, f"num_decoder_layers=0 {WRONG}"),
        ({"max_target_positions": 0}, f"max_target_positions=0 {WRONG}"),
        ({"decoder_attention_type": "none"}, "decoder_attention_type='none' is not one of 'window'"),
        ({"decoder_ssm_layers": [5]}, r"decoder_ssm_layers=\[5\] must be distinct layers from 0 to 1"),
        ({"decoder_position_embedding_type": "rope"}, "decoder_position_embedding_type='rope' is not one of"),
        ({"decoder_start_token_id": 61}, "decoder_start_token_id=61 must lie below vocab_size=61"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False contradicts SpadeSeq2SeqConfig"),
        ({"pixel_input": True}, "pixel_input.* belong to SpadeConfig"),
    ],
}
# refused by the layer that the model builds from them
REFUSED_BY_THE_MODEL: dict[str, list[tuple[dict, str]]] = {
    ATTENTION: [({"attn_implementation": "lightning"}, 'attn_implementation="lightning"` is not supported.*eager')],
    "bst sh s4d": [
        ({"ssm_dt_min": 0.2}, "dt_min <= dt_max, got 0.2 and 0.1"),
        ({"ssm_num_dynamics": 5}, "num_dynamics must divide the 24 systems, got 5"),
    ],
    FILTER: [
        ({"filter_emb_dim": 4}, "filter_emb must be odd and at least 3.*got 4"),
        ({"filter_decay_target": 2.0}, r"0 < decay_target < 1, got 0\.3, 1\.5, 2\.0"),
    ],
    "spade s4 window": [
        ({"ssm_state_size": 7}, "ssm_state_size=7 must be even"),
        ({"ssm_type": "s5", "s5_blocks": 3}, "state_size must be a multiple of 2 blocks = 6, got 8"),
        ({"ssm_type": "hyena", "filter_emb_dim": 4}, "filter_emb must be odd.*got 4"),
        ({"ssm_type": "ema", "ema_activation": "tanh"}, "activation='tanh' must be 'silu' or None"),
        ({"pixel_input": True}, "pixel_input=True.* are for classification"),
        ({"paired_input": True}, "paired_input=True are for classification"),
    ],
    "bst s5 bidirectional": [({}, "bidirectional=True is for classification")],
}


def _refused(variant: str, fields: dict, words: str) -> Misuse:
    def provoke(folder: Path) -> None:
        config_of(variant, **fields)

    return Misuse("configuration", f"{variant} with {_written(fields)}", provoke, REFUSALS, words)


def _refused_by_the_model(variant: str, fields: dict, words: str) -> Misuse:
    def provoke(folder: Path) -> None:
        config = config_of(variant, **fields)
        name = "BstForCausalLM" if variant.startswith("bst") else next(n for n in classes_of(variant) if "Causal" in n)
        getattr(hf_hybrid_ssm, name)(config)

    return Misuse("model", f"{variant} with {_written(fields)}", provoke, (ValueError,), words)


def _written(fields: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items()) or "a causal head"


OTHERS = [
    Misuse(
        "preset",
        "a name that no paper has",
        lambda folder: hf_hybrid_ssm.LonghornConfig.preset("125b"),
        (ValueError,),
        "no preset '125b'; it has '125m'",
    ),
    Misuse(
        "preset",
        "a number instead of a name",
        lambda folder: hf_hybrid_ssm.BstConfig.preset(200),  # type: ignore[arg-type]
        (ValueError,),
        "no preset 200; it has '80m', '200m'",
    ),
    Misuse(
        "preset",
        "another family's name",
        lambda folder: hf_hybrid_ssm.LmuIsaConfig.preset("spade-base"),
        (ValueError,),
        "no preset 'spade-base'",
    ),
    Misuse(
        "preset",
        "an override that does not fit",
        lambda folder: hf_hybrid_ssm.SpadeConfig.preset("spade-lm-wt103", num_attention_heads=3),
        (ValueError,),
        "hidden_size=1024 must be a multiple of num_attention_heads=3",
    ),
    Misuse(
        "configuration",
        "a model type that nobody registered",
        lambda folder: AutoConfig.for_model("longhorm"),
        (ValueError,),
        "Unrecognized model identifier: longhorm",
    ),
    Misuse(
        "model",
        "a dict instead of a configuration",
        lambda folder: hf_hybrid_ssm.LonghornModel({"hidden_size": 24}),
        (TypeError, ValueError),
        "LonghornModel needs a LonghornConfig, got dict",
    ),
    *(
        Misuse(
            "model",
            f"{class_name} from a configuration of {variant}",
            lambda folder, class_name=class_name, variant=variant: getattr(hf_hybrid_ssm, class_name)(
                config_of(variant)
            ),
            (TypeError,),
            rf"{class_name}.*{wanted}.*got {given}",
        )
        for class_name, variant, wanted, given in (
            ("LonghornForCausalLM", "bst sh s4d", "LonghornConfig", "BstConfig"),
            ("BstModel", "longhorn", "BstConfig", "LonghornConfig"),
            ("LmuIsaForSequenceClassification", "spade s4 window", "LmuIsaConfig", "SpadeConfig"),
            ("SpadeForConditionalGeneration", "spade s4 window", "SpadeSeq2SeqConfig", "SpadeConfig"),
        )
    ),
]
MISUSES = [
    *(_refused(variant, *case) for variant, cases in REFUSED.items() for case in cases),
    *(_refused_by_the_model(variant, *case) for variant, cases in REFUSED_BY_THE_MODEL.items() for case in cases),
    *OTHERS,
]
