"""Random tiny configurations: legal ones by construction, and illegal ones by one broken field."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

from hf_hybrid_ssm.layers.mixers import MIXERS
from tests.invariants.variants import BST, LMU, LONGHORN, SPADE, TOKENS

Fields = dict[str, Any]
FLAG = (True, False)


def longhorn(random: Random) -> Fields:
    layers = random.randint(1, 3)
    kinds = random.choice(
        [("linear_attention",), ("linear_attention", "sliding_attention", "full_attention"), ("full_attention",)]
    )
    heads = random.choice([1, 2, 4])
    return {
        **LONGHORN,
        "num_hidden_layers": layers,
        "block_types": [random.choice(kinds) for _ in range(layers)],
        "hidden_size": random.choice([8, 24]),
        "state_size": random.choice([1, 2, 5, 16]),
        "expand": random.choice([1, 2]),
        "conv_kernel": random.choice([1, 2, 4]),
        "time_step_rank": random.choice(["auto", 1, 3]),
        "use_bias": random.choice(FLAG),
        "use_conv_bias": random.choice(FLAG),
        "use_scan_norm": random.choice(FLAG),
        "residual_in_fp32": random.choice(FLAG),
        "rescale_prenorm_residual": random.choice(FLAG),
        "sliding_window": random.choice([1, 3, 50]),
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "head_dim": random.choice([2, 6, 8]),
        "attention_dropout": random.choice([0.0, 0.3]),
        "mlp_intermediate_size": random.choice([None, 1, 17]),
        "max_position_embeddings": random.choice([4, 2048]),
    }


def bst(random: Random) -> Fields:
    layers = random.randint(1, 3)
    bidirectional = random.random() < 0.2
    kinds = ("sliding_attention", "bst") if bidirectional else ("sliding_attention", "bst", "block_recurrent")
    block_types = [random.choice(kinds) for _ in range(layers)]
    variant = random.choice(["sh", "mh"] if bidirectional else ["sh", "mh", "mf"])
    ssm = random.choice(["s4d", "s4", "unstructured", "s5"] + ["ema", "hyena", "lstm"] * (variant == "sh"))
    buckets = random.choice([4, 8] if bidirectional else [2, 6, 8])
    window = random.choice([1, 3, 6])
    fields = {
        **BST,
        "num_hidden_layers": layers,
        "block_types": block_types,
        "ssm_layers": None,
        "num_attention_heads": random.choice([1, 2, 3]),
        "head_dim": random.choice([4, 7]),
        "hidden_act": random.choice(["relu", "gelu", "silu"]),
        "sliding_window": window,
        "context_variant": variant,
        "num_context_states": random.choice([1, 3]),
        "recurrent_num_states": random.choice([1, 4]),
        "ssm_type": ssm,
        "ssm_state_size": random.choice([2, 4, 8]),
        "ssm_num_dynamics": random.choice([None, 1, 2]),
        "ssm_init": random.choice(["legs", "inv", "lin"]),
        "ssm_discretization": random.choice([None, *MIXERS[ssm].discretizations]),
        "ssm_input_norm": random.choice(FLAG),
        "ssm_skip": random.choice(FLAG),
        "ssm_learning_rate": random.choice([None, 1e-3]),
        "filter_length": random.choice([1, 5, 30]),
        "filter_emb_dim": random.choice([3, 9]),
        "filter_hidden_size": random.choice([1, 8]),
        "filter_inner_layers": random.choice([0, 2]),
        "cross_attention_inclusive": random.choice(FLAG),
        "bidirectional": bidirectional,
        "qk_norm": random.choice(FLAG),
        "attend_self": random.choice(FLAG),
        "zero_kv_sink": random.choice(FLAG),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": random.choice([buckets // 2 + 1, 40]),
        "dropout": random.choice([0, 0.2]),
        "logit_scale": random.choice([None, 1.0]),
    }
    if "bst" in block_types and not bidirectional and random.random() < 0.3:
        slots = fields["num_context_states"] if variant == "mf" else window
        memory = random.choice([2, 9])
        fields |= {
            "retrieval_k": random.randint(1, memory),
            "retrieval_memory": memory,
            "retrieval_stride": random.randint(1, slots),
        }
    return fields


def lmu_isa(random: Random) -> Fields:
    order = random.choice([1, 4, 10])
    return {
        **LMU,
        "num_hidden_layers": random.randint(1, 3),
        "lmu_order": order,
        "lmu_reduced_order": random.choice([None, 1, order]),
        "lmu_theta": random.choice([10, 12.5, 300.0]),
        "first_sublayer": random.choice(["ffn", "global_attention", "window_attention"]),
        "pre_intermediate_size": random.choice([None, 1, 30]),
        "post_intermediate_size": random.choice([1, 40]),
        "num_attention_heads": random.choice([1, 3, 4]),
        "sliding_window": random.choice([1, 5]),
        "hidden_act": random.choice(["gelu", "relu", "tanh"]),
        "use_bias": random.choice(FLAG),
        "attention_scale": random.choice([1.0, 0.2]),
        "conv_mode": random.choice(["chunked", "fft", "recurrent"]),
        "hidden_dropout": random.choice([0, 0.1]),
        "attention_dropout": random.choice([0, 0.1]),
    }


def spade(random: Random) -> Fields:
    layers = random.randint(1, 3)
    ssm = random.choice(["s4", "s4d", "s5", "hyena", "unstructured", "ema", "lstm"])
    buckets = random.choice([4, 8, 32])
    return {
        **SPADE,
        "num_hidden_layers": layers,
        "num_attention_heads": random.choice([1, 3, 4]),
        "attention_type": random.choice(["window", "chunk", "full"]),
        "sliding_window": random.choice([2, 7]),
        "chunk_size": random.choice([1, 5]),
        "ssm_layers": random.sample(range(layers), random.randint(0, layers)),
        "ssm_type": ssm,
        "ssm_state_size": random.choice([4, 8]),
        "ssm_num_dynamics": random.choice([None, 1, 2]),
        "ssm_trainable": random.choice(
            [None, "none", "all"] + ["output"] * ("output" in MIXERS[ssm].trainable_choices)
        ),
        "ssm_stop_gradient": random.choice(FLAG),
        "ssm_skip": random.choice(FLAG),
        "ssm_merge": random.choice(["concat", "add", "stack"]),
        "ssm_merge_weight": random.choice([0.0, 0.5, 1.0]),
        "s5_blocks": random.choice([1, 2]),
        "filter_length": random.choice([1, 16]),
        "filter_hidden_size": random.choice([1, 8]),
        "filter_emb_dim": random.choice([3, 9]),
        "ema_activation": random.choice([None, "silu"]),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": random.choice([buckets // 2 + 1, 128]),
        "relative_bias_scope": random.choice(["shared", "per_layer", "none"]),
        "norm_position": random.choice(["pre", "post"]),
        "norm_type": random.choice(["layernorm", "scalenorm", "batchnorm"]),
        "final_norm": random.choice([None, *FLAG]),
        "embedding_norm": random.choice([None, *FLAG]),
        "hidden_act": random.choice(["relu", "gelu"]),
        "activation_dropout": random.choice([0, 0.1]),
        "scale_embedding": random.choice(FLAG),
        "pooling": random.choice(["first", "mean"]),
        "classifier_hidden_size": random.choice([None, 7]),
        "classifier_activation": random.choice(["tanh", "relu"]),
    }


def spade_with_options(random: Random) -> Fields:
    fields = spade(random)
    kind = random.choice(["plain", "adaptive", "pixels", "pairs"])
    if kind == "adaptive":
        bands = random.choice([[20], [20, 40]])
        return fields | {"adaptive_cutoffs": bands, "adaptive_factor": 2, "tie_word_embeddings": True}
    return fields | {"pixel_input": kind == "pixels", "paired_input": kind == "pairs"}


def spade_seq2seq(random: Random) -> Fields:
    layers = random.randint(1, 2)
    return spade(random) | {
        "num_decoder_layers": layers,
        "decoder_attention_type": random.choice(["window", "chunk", "full"]),
        "decoder_ssm_layers": random.sample(range(layers), random.randint(0, layers)),
        "decoder_position_embedding_type": random.choice(["learned", "relative"]),
        "decoder_attention_bias": random.choice(FLAG),
        "max_target_positions": random.choice([12, 64]),
    }


FAMILIES: dict[str, Callable[[Random], Fields]] = {
    "longhorn": longhorn,
    "bst": bst,
    "lmu_isa": lmu_isa,
    "spade": spade_with_options,
    "spade_seq2seq": spade_seq2seq,
}


def legal(model_type: str, random: Random) -> Fields:
    """Fields that fit each other by construction."""
    fields = TOKENS | FAMILIES[model_type](random)
    common = {
        "tie_word_embeddings": fields.get("tie_word_embeddings", random.choice(FLAG)),
        "use_cache": random.choice(FLAG),
        "use_linear_cross_entropy": random.choice(FLAG),
        "num_labels": random.choice([1, 2, 5]),
    }
    return fields | common


def crossed(model_type: str, random: Random) -> Fields:
    """Each field from one of two legal configurations: they may or may not fit each other."""
    one, other = legal(model_type, random), legal(model_type, random)
    return {name: random.choice([fields[name] for fields in (one, other) if name in fields]) for name in one | other}


NUMBER: tuple = (0, -1, "3", 2.5, None)
REAL: tuple = (-1.0, math.nan, math.inf, "0.1")
CHOICE: tuple = ("nonsense", "", 7)
PROBABILITY: tuple = (-0.1, 1.0, math.nan, "0.1")
TRUTH: tuple = ("yes", 2, None)
# values that no combination makes legal, by field
BROKEN: dict[str, dict[str, tuple]] = {
    "longhorn": {
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "state_size", "expand", "conv_kernel"), NUMBER),
        "vocab_size": NUMBER,
        "max_position_embeddings": NUMBER,
        "time_step_rank": (0, -1, 2.5, "large"),
        "mlp_intermediate_size": (0, -1, "3"),
        "layer_norm_epsilon": (*REAL, 0.0),
        "initializer_range": REAL,
        "attention_dropout": PROBABILITY,
        **dict.fromkeys(("use_bias", "use_conv_bias", "residual_in_fp32", "tie_word_embeddings", "use_cache"), TRUTH),
        "block_types": (["mamba"] * 4, [], "linear_attention", [0]),
        "num_labels": (0, -2),
    },
    "bst": {
        **dict.fromkeys(
            ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "sliding_window"), NUMBER
        ),
        **dict.fromkeys(("vocab_size", "intermediate_size", "num_context_states", "recurrent_num_states"), NUMBER),
        **dict.fromkeys(("context_variant", "ssm_type", "ssm_init", "ssm_discretization", "hidden_act"), CHOICE),
        "ssm_state_size": (0, -2, 3, "4"),
        "relative_attention_num_buckets": (0, 3, -2, None),
        "relative_attention_max_distance": (0, 1, "3"),
        "filter_length": NUMBER,
        "filter_inner_layers": (-1, "2"),
        "filter_sin_freq": (*REAL, 0.0),
        "ssm_learning_rate": (*REAL, 0.0),
        "layer_norm_epsilon": (*REAL, 0.0),
        "logit_scale": (*REAL, 0.0),
        **dict.fromkeys(("dropout", "attention_dropout", "final_dropout"), PROBABILITY),
        **dict.fromkeys(("initializer_range", "context_init_std", "context_id_std"), REAL),
        **dict.fromkeys(("qk_norm", "attend_self", "zero_kv_sink", "bidirectional", "ssm_skip"), TRUTH),
        "block_types": (["mamba"] * 4, [], "sliding_attention", [0]),
        "ssm_layers": ([7], [0, 0], [-1], ["a"], 0),
        "retrieval_k": (0, -1, 5000),
    },
    "lmu_isa": {
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "lmu_order", "post_intermediate_size"), NUMBER),
        "vocab_size": NUMBER,
        "lmu_reduced_order": (0, -1, 11, "1"),
        "lmu_theta": (*REAL, 0),
        "attention_scale": (*REAL, 0.0),
        "first_sublayer": CHOICE,
        "conv_mode": CHOICE,
        "hidden_act": CHOICE,
        "layer_norm_epsilon": (*REAL, 0.0),
        "initializer_range": REAL,
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), PROBABILITY),
        **dict.fromkeys(("use_bias", "tie_word_embeddings", "use_cache"), TRUTH),
    },
    "spade": {
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), NUMBER),
        "sliding_window": NUMBER,
        **dict.fromkeys(("vocab_size", "chunk_size", "filter_length"), NUMBER),
        **dict.fromkeys(("attention_type", "ssm_type", "ssm_trainable", "ssm_merge", "norm_type"), CHOICE),
        **dict.fromkeys(("norm_position", "pooling", "relative_bias_scope", "hidden_act"), CHOICE),
        "classifier_activation": CHOICE,
        "ssm_state_size": (0, -2, "4"),
        "ssm_merge_weight": REAL,
        "relative_attention_num_buckets": (0, 6, -4, None),
        "relative_attention_max_distance": (0, 1, "9"),
        "filter_sin_freq": (*REAL, 0.0),
        "layer_norm_epsilon": (*REAL, 0.0),
        "initializer_range": REAL,
        "pixel_std": (*REAL, 0.0),
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "embedding_dropout"), PROBABILITY),
        **dict.fromkeys(("adaptive_dropout", "classifier_dropout"), PROBABILITY),
        **dict.fromkeys(("ssm_stop_gradient", "scale_embedding", "paired_input", "use_cache"), TRUTH),
        "ssm_layers": ([9], [0, 0], [-1], ["a"], 5, "all"),
        "adaptive_cutoffs": ([], [0], [61], [40, 20], ["a"]),
    },
}
BROKEN["spade_seq2seq"] = {
    **{name: values for name, values in BROKEN["spade"].items() if name not in ("pixel_std", "paired_input")},
    "num_decoder_layers": NUMBER,
    "max_target_positions": NUMBER,
    "decoder_attention_type": CHOICE,
    "decoder_position_embedding_type": CHOICE,
    "decoder_ssm_layers": ([9], [0, 0], [-1], "all"),
    "decoder_start_token_id": (-1, 61, "0"),
    "is_encoder_decoder": (False, "yes"),
}


def broken(model_type: str, random: Random) -> tuple[Fields, str]:
    """Legal fields but for one, and its name."""
    name = random.choice(sorted(BROKEN[model_type]))
    return legal(model_type, random) | {name: random.choice(BROKEN[model_type][name])}, name
