"""Random tiny configurations that are legal by construction."""

from random import Random
from typing import Any

from tests.tiny_models import BST, LMU, LONGHORN, SPADE, TOKENS

Fields = dict[str, Any]
FLAG = (True, False)
DISCRETIZATIONS = {
    "s4d": (None, "zoh", "bilinear"),
    "s4": (None, "bilinear"),
    "s5": (None, "zoh"),
    "unstructured": (None,),
}
# fmt: off
# fields that fit whatever the others are, and their values
FREE: dict[str, dict[str, tuple]] = {
    "common": {
        "tie_word_embeddings": FLAG, "use_cache": FLAG, "use_linear_cross_entropy": FLAG, "num_labels": (1, 2, 5),
    },
    "longhorn": {
        "hidden_size": (8, 24), "state_size": (1, 2, 5, 16), "expand": (1, 2), "conv_kernel": (1, 2, 4),
        "time_step_rank": ("auto", 1, 3), "use_bias": FLAG, "use_conv_bias": FLAG, "use_scan_norm": FLAG,
        "residual_in_fp32": FLAG, "rescale_prenorm_residual": FLAG, "sliding_window": (1, 3, 50),
        "head_dim": (2, 6, 8), "attention_dropout": (0.0, 0.3), "mlp_intermediate_size": (None, 1, 17),
        "max_position_embeddings": (4, 2048), "num_attention_heads": (4,), "num_key_value_heads": (1, 2, 4),
    },
    "bst": {
        "num_attention_heads": (1, 2, 3), "head_dim": (4, 7), "hidden_act": ("relu", "gelu", "silu"),
        "num_context_states": (1, 3), "recurrent_num_states": (1, 4), "ssm_state_size": (2, 4, 8),
        "ssm_num_dynamics": (None, 1, 2), "ssm_init": ("legs", "inv", "lin"), "ssm_input_norm": FLAG,
        "ssm_skip": FLAG, "ssm_learning_rate": (None, 1e-3), "filter_length": (1, 5, 30), "filter_emb_dim": (3, 9),
        "filter_hidden_size": (1, 8), "filter_inner_layers": (0, 2), "cross_attention_inclusive": FLAG,
        "qk_norm": FLAG, "attend_self": FLAG, "zero_kv_sink": FLAG, "dropout": (0, 0.2), "logit_scale": (None, 1.0),
    },
    "lmu_isa": {
        "num_hidden_layers": (1, 2, 3), "lmu_theta": (10, 12.5, 300.0), "pre_intermediate_size": (None, 1, 30),
        "first_sublayer": ("ffn", "global_attention", "window_attention"), "post_intermediate_size": (1, 40),
        "num_attention_heads": (1, 3, 4), "sliding_window": (1, 5), "hidden_act": ("gelu", "relu", "tanh"),
        "use_bias": FLAG, "attention_scale": (1.0, 0.2), "conv_mode": ("chunked", "fft", "recurrent"),
        "hidden_dropout": (0, 0.1), "attention_dropout": (0, 0.1),
    },
    "spade": {
        "num_attention_heads": (1, 3, 4), "attention_type": ("window", "chunk", "full"), "sliding_window": (2, 7),
        "chunk_size": (1, 5), "ssm_state_size": (4, 8), "ssm_num_dynamics": (None, 1, 2), "ssm_stop_gradient": FLAG,
        "ssm_skip": FLAG, "ssm_merge": ("concat", "add", "stack"), "ssm_merge_weight": (0.0, 0.5, 1.0),
        "s5_blocks": (1, 2), "filter_length": (1, 16), "filter_hidden_size": (1, 8), "filter_emb_dim": (3, 9),
        "ema_activation": (None, "silu"), "relative_bias_scope": ("shared", "per_layer", "none"),
        "norm_position": ("pre", "post"), "norm_type": ("layernorm", "scalenorm", "batchnorm"),
        "final_norm": (None, *FLAG), "embedding_norm": (None, *FLAG), "hidden_act": ("relu", "gelu"),
        "activation_dropout": (0, 0.1), "scale_embedding": FLAG, "pooling": ("first", "mean"),
        "classifier_hidden_size": (None, 7), "classifier_activation": ("tanh", "relu"),
    },
    "spade_seq2seq": {
        "decoder_attention_type": ("window", "chunk", "full"), "decoder_attention_bias": FLAG,
        "decoder_position_embedding_type": ("learned", "relative"), "max_target_positions": (12, 64),
    },
}
# fmt: on


def _free(name: str, random: Random) -> Fields:
    return {field: random.choice(values) for field, values in FREE[name].items()}


def longhorn(random: Random) -> Fields:
    kinds = random.choice(
        [("linear_attention",), ("linear_attention", "sliding_attention", "full_attention"), ("full_attention",)]
    )
    layers = random.randint(1, 3)
    block_types = [random.choice(kinds) for _ in range(layers)]
    return LONGHORN | _free("longhorn", random) | {"num_hidden_layers": layers, "block_types": block_types}


def bst(random: Random) -> Fields:
    layers, bidirectional = random.randint(1, 3), random.random() < 0.2
    kinds = ("sliding_attention", "bst") if bidirectional else ("sliding_attention", "bst", "block_recurrent")
    block_types = [random.choice(kinds) for _ in range(layers)]
    variant = random.choice(["sh", "mh"] if bidirectional else ["sh", "mh", "mf"])
    ssm = random.choice([*DISCRETIZATIONS])
    buckets = random.choice([4, 8] if bidirectional else [2, 6, 8])
    window = random.choice([1, 3, 6])
    fields = BST | _free("bst", random)
    fields |= {
        "num_hidden_layers": layers,
        "block_types": block_types,
        "ssm_layers": None,
        "sliding_window": window,
        "context_variant": variant,
        "ssm_type": ssm,
        "ssm_discretization": random.choice(DISCRETIZATIONS[ssm]),
        "bidirectional": bidirectional,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": random.choice([buckets // 2 + 1, 40]),
    }
    if "bst" in block_types and not bidirectional and random.random() < 0.3:
        slots = fields["num_context_states"] if variant == "mf" else window
        memory = random.choice([2, 9])
        fields |= {"retrieval_k": random.randint(1, memory), "retrieval_memory": memory}
        fields |= {"retrieval_stride": random.randint(1, slots)}
    return fields


def lmu_isa(random: Random) -> Fields:
    order = random.choice([1, 4, 10])
    orders = {"lmu_order": order, "lmu_reduced_order": random.choice([None, 1, order])}
    return LMU | _free("lmu_isa", random) | orders


def spade(random: Random, encoder_decoder: bool = False) -> Fields:
    layers = random.randint(1, 3)
    ssm = random.choice(["s4", "s4d", "s5", "hyena", "ema", "lstm"])
    buckets = random.choice([4, 8, 32])
    fields = SPADE | _free("spade", random)
    fields |= {
        "num_hidden_layers": layers,
        "ssm_layers": random.sample(range(layers), random.randint(0, layers)),
        "ssm_type": ssm,
        "ssm_trainable": random.choice([None, "none", "all"] + ["output"] * (ssm in ("s4", "s4d", "s5"))),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": random.choice([buckets // 2 + 1, 128]),
    }
    kind = "plain" if encoder_decoder else random.choice(["plain", "adaptive", "pixels", "pairs"])
    if kind == "adaptive":
        bands = random.choice([[20], [20, 40]])
        return fields | {"adaptive_cutoffs": bands, "adaptive_factor": 2, "tie_word_embeddings": True}
    return fields | ({} if encoder_decoder else {"pixel_input": kind == "pixels", "paired_input": kind == "pairs"})


def spade_seq2seq(random: Random) -> Fields:
    layers = random.randint(1, 2)
    decoder = {"num_decoder_layers": layers}
    decoder["decoder_ssm_layers"] = random.sample(range(layers), random.randint(0, layers))
    return spade(random, encoder_decoder=True) | _free("spade_seq2seq", random) | decoder


FAMILIES = {"longhorn": longhorn, "bst": bst, "lmu_isa": lmu_isa, "spade": spade, "spade_seq2seq": spade_seq2seq}


def legal(model_type: str, random: Random) -> Fields:
    """Fields that fit each other by construction."""
    return TOKENS | _free("common", random) | FAMILIES[model_type](random)


def crossed(model_type: str, random: Random) -> Fields:
    """Each field from one of two legal configurations: they may or may not fit each other."""
    one, other = legal(model_type, random), legal(model_type, random)
    return {name: random.choice([fields[name] for fields in (one, other) if name in fields]) for name in one | other}
