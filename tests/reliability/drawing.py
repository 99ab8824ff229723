"""Random tiny configurations: the variants that all tests share, with other layers, sizes and options."""

from random import Random
from typing import Any

from tests.tiny_models import EVERY, TOKENS

Fields = dict[str, Any]
FLAG = (True, False)
DISCRETIZATIONS = {"s4d": (None, "zoh", "bilinear"), "s4": (None, "bilinear"), "s5": (None, "zoh")}
# fmt: off
# fields that fit whatever the variant is, and their values
FREE: dict[str, dict[str, tuple]] = {
    "common": {
        "tie_word_embeddings": FLAG, "use_cache": FLAG, "use_linear_cross_entropy": FLAG, "num_labels": (1, 2, 5),
    },
    "longhorn": {
        "hidden_size": (8, 24), "state_size": (1, 2, 5, 16), "expand": (1, 2), "conv_kernel": (1, 2, 4),
        "time_step_rank": ("auto", 1, 3), "use_bias": FLAG, "use_conv_bias": FLAG,
        "residual_in_fp32": FLAG, "rescale_prenorm_residual": FLAG, "sliding_window": (1, 3, 50),
        "head_dim": (2, 6, 8), "attention_dropout": (0.0, 0.3), "mlp_intermediate_size": (None, 1, 17),
        "max_position_embeddings": (4, 2048), "num_key_value_heads": (1, 2, 4),
    },
    "bst": {
        "num_attention_heads": (1, 2, 3), "head_dim": (4, 7), "hidden_act": ("relu", "gelu", "silu"),
        "num_context_states": (2, 3), "recurrent_num_states": (1, 4), "sliding_window": (2, 3, 6),
        "ssm_num_dynamics": (None, 1, 2), "ssm_init": ("legs", "inv", "lin"), "ssm_input_norm": FLAG,
        "filter_length": (1, 5, 30),
        "qk_norm": FLAG, "attend_self": FLAG, "zero_kv_sink": FLAG, "dropout": (0, 0.2), "logit_scale": (None, 1.0),
        "relative_attention_num_buckets": (4, 8), "relative_attention_max_distance": (5, 40),
    },
    "lmu_isa": {
        "num_hidden_layers": (1, 2, 3), "lmu_theta": (10, 12.5, 300.0), "pre_intermediate_size": (None, 1, 30),
        "lmu_order": (3, 10), "lmu_reduced_order": (None, 1, 3), "post_intermediate_size": (1, 40),
        "num_attention_heads": (1, 3, 4), "sliding_window": (1, 5), "hidden_act": ("gelu", "relu", "tanh"),
        "use_bias": FLAG, "attention_scale": (1.0, 0.2), "hidden_dropout": (0, 0.1), "attention_dropout": (0, 0.1),
    },
    "spade": {
        "num_attention_heads": (1, 3, 4), "attention_type": ("window", "chunk", "full"), "sliding_window": (2, 7),
        "chunk_size": (1, 5), "ssm_state_size": (4, 8), "ssm_num_dynamics": (None, 1, 2), "ssm_stop_gradient": FLAG,
        "ssm_merge": ("concat", "add", "stack"), "ssm_merge_weight": (0.0, 0.5, 1.0),
        "filter_length": (1, 16),
        "ssm_trainable": (None, "none", "all"), "relative_bias_scope": ("shared", "per_layer", "none"),
        "norm_position": ("pre", "post"), "norm_type": ("layernorm", "scalenorm", "batchnorm"),
        "final_norm": (None, *FLAG), "embedding_norm": (None, *FLAG), "hidden_act": ("relu", "gelu"),
        "activation_dropout": (0, 0.1), "scale_embedding": FLAG, "pooling": ("first", "mean"),
        "classifier_hidden_size": (None, 7), "classifier_activation": ("tanh", "relu"),
        "relative_attention_num_buckets": (4, 8, 32),
        "relative_attention_max_distance": (17, 128),
    },
}
FREE["spade_seq2seq"] = FREE["spade"] | {
    "decoder_attention_type": ("window", "chunk", "full"), "decoder_attention_bias": FLAG,
    "decoder_position_embedding_type": ("learned", "relative"), "max_target_positions": (12, 64),
}
# fmt: on


def legal(model_type: str, random: Random) -> Fields:
    """Fields that fit each other by construction."""
    own = random.choice([own for of, own in EVERY.values() if of == model_type])
    fields = TOKENS | own
    fields |= {name: random.choice(values) for name, values in (FREE["common"] | FREE[model_type]).items()}
    layers, ssm = random.randint(1, 3), fields.get("ssm_type", "s4d" if model_type == "bst" else "s4")
    fields["num_hidden_layers"] = layers
    if own.get("layer_types") is not None:
        fields["layer_types"] = random.choices(own["layer_types"], k=layers)
    elif model_type == "bst":
        fields["ssm_layers"] = random.sample(range(layers), random.randint("retrieval_k" in own, layers))
    elif model_type.startswith("spade"):
        fields["ssm_layers"] = random.sample(range(layers), random.randint(0, layers))
    if model_type == "bst":
        fields["ssm_discretization"] = random.choice(DISCRETIZATIONS.get(ssm, (None,)))
    if model_type == "spade_seq2seq":
        decoders = random.randint(1, 2)
        fields |= {"num_decoder_layers": decoders}
        fields["decoder_ssm_layers"] = random.sample(range(decoders), random.randint(0, decoders))
    if "adaptive_cutoffs" in own:
        fields["tie_word_embeddings"] = True
    elif model_type == "spade":
        fields |= random.choice([{}, {}, {"pixel_input": True}, {"paired_input": True}])
    return fields


def crossed(model_type: str, random: Random) -> Fields:
    """Each field from one of two legal configurations: they may or may not fit each other."""
    one, other = legal(model_type, random), legal(model_type, random)
    return {name: random.choice([fields[name] for fields in (one, other) if name in fields]) for name in one | other}
