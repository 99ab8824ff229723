"""Tiny models of every family and variant, as the invariance suite sees them."""

from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_hybrid_ssm  # noqa: F401  (registers the families)

TOKENS = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONGHORN = {"hidden_size": 24, "num_hidden_layers": 3, "state_size": 5, "num_attention_heads": 4}
BST = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "sliding_window": 6,
    "ssm_layers": [0, 2],
    "num_context_states": 3,
    "ssm_state_size": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "initializer_range": 0.5,
}
LMU = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "lmu_order": 10,
    "lmu_reduced_order": 3,
    "lmu_theta": 12.0,
    "post_intermediate_size": 40,
    "num_attention_heads": 4,
}
SPADE = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "sliding_window": 7,
    "chunk_size": 5,
    "ssm_state_size": 8,
}

VARIANTS: dict[str, tuple[str, dict]] = {
    "longhorn": ("longhorn", LONGHORN),
    "longhorn scan norm": ("longhorn", {**LONGHORN, "use_scan_norm": True, "conv_kernel": 2}),
    "longhorn + window and full attention": (
        "longhorn",
        {
            **LONGHORN,
            "block_types": ["linear_attention", "sliding_attention", "full_attention"],
            "sliding_window": 6,
            "num_key_value_heads": 2,
            "mlp_intermediate_size": 40,
        },
    ),
    "bst sh s4d": ("bst", BST),
    "bst mh s4": ("bst", {**BST, "context_variant": "mh", "ssm_type": "s4"}),
    "bst mf unstructured": ("bst", {**BST, "context_variant": "mf", "ssm_type": "unstructured", "filter_length": 16}),
    "bst with memory": ("bst", {**BST, "retrieval_k": 2, "retrieval_memory": 7, "retrieval_stride": 2}),
    "bst block-recurrent": (
        "bst",
        {
            **BST,
            "ssm_layers": None,
            "block_types": ["block_recurrent", "sliding_attention", "bst"],
            "recurrent_num_states": 3,
        },
    ),
    "lmu-isa": ("lmu_isa", LMU),
    "lmu-isa + global attention": ("lmu_isa", {**LMU, "first_sublayer": "global_attention"}),
    "lmu-isa + window attention": ("lmu_isa", {**LMU, "first_sublayer": "window_attention", "sliding_window": 5}),
    "spade s4 window": ("spade", SPADE),
    "spade s5 chunk post-norm": (
        "spade",
        {**SPADE, "ssm_type": "s5", "s5_blocks": 2, "attention_type": "chunk", "norm_position": "post"},
    ),
    "spade hyena full": ("spade", {**SPADE, "ssm_type": "hyena", "attention_type": "full", "filter_length": 16}),
    "longhorn + full attention": (
        "longhorn",
        {**LONGHORN, "block_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
}


@cache
def build(name: str) -> torch.nn.Module:
    """The causal language model of a variant, in evaluation mode, away from the smooth initial point."""
    model_type, fields = VARIANTS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **TOKENS, **fields)).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and parameter.requires_grad and ".ssm." not in parameter_name:
            parameter.data.mul_(1.5)
    return model
