"""Small models of every family and of their variants, for tests that go over all of them."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

import hf_hybrid_ssm  # noqa: F401 - registers the families

VOCABULARY = 60
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2, "use_cache": False}
SPADE = {"intermediate_size": 56, "num_attention_heads": 2, "sliding_window": 16}
BST = {"intermediate_size": 56, "num_attention_heads": 2, "head_dim": 10, "sliding_window": 16, "ssm_layers": [1]}
LMU = {"lmu_order": 20, "lmu_reduced_order": 6, "pre_intermediate_size": 31, "post_intermediate_size": 43}
LMU |= {"lmu_theta": 30.0}
STILL = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout", "activation_dropout"), 0.0)
HYBRID = {"block_types": ["linear_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 3}
HYBRID |= {"sliding_window": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "mlp_intermediate_size": 40}
CASES = {
    "longhorn": ("longhorn", {"state_size": 5}),
    "longhorn hybrid": ("longhorn", {"state_size": 5, **HYBRID}),
    "spade": ("spade", SPADE),
    "spade chunk": (
        "spade",
        {**SPADE, "attention_type": "chunk", "chunk_size": 16, "relative_bias_scope": "none", "scale_embedding": True},
    ),
    "spade full, trained s4": ("spade", {**SPADE, "attention_type": "full", "ssm_trainable": "all"}),
    "spade post norm": ("spade", {**SPADE, "norm_position": "post", "hidden_act": "silu", "activation_dropout": 0.1}),
    "spade classifier": ("spade", {**SPADE, "pooling": "mean", "ssm_trainable": "all", "num_labels": 3}),
    "bst sh": ("bst", BST),
    "bst mh": ("bst", {**BST, "context_variant": "mh"}),
    "bst mf": ("bst", {**BST, "context_variant": "mf", "num_context_states": 4}),
    "bst brect": ("bst", {**BST, "ssm_layers": None, "block_types": ["sliding_attention", "block_recurrent"]}),
    "lmu_isa": ("lmu_isa", LMU),
    "lmu_isa global": ("lmu_isa", {**LMU, "first_sublayer": "global_attention", "num_attention_heads": 2}),
    "lmu_isa window": (
        "lmu_isa",
        {**LMU, "first_sublayer": "window_attention", "num_attention_heads": 2, "sliding_window": 20},
    ),
    "spade_seq2seq": ("spade_seq2seq", {**SPADE, "num_decoder_layers": 2}),
}
CASES["bst brect"][1]["recurrent_num_states"] = 12


def built(case: str, dtype: torch.dtype = torch.float32, **more) -> PreTrainedModel:
    """The model of one of `CASES`, with the same weights each time."""
    family, fields = CASES[case]
    config = AutoConfig.for_model(family, **SIZES | fields | more)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if "classifier" in case:
        auto = AutoModelForSequenceClassification
    torch.manual_seed(0)
    return auto.from_config(config, dtype=dtype).train()
