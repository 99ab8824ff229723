"""Phi-3 is a Mistral whose projections are fused: it becomes one, and can be upcycled."""

import copy
from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from hf_hybrid_ssm.upcycle.teachers import head_dim_of

FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "use_cache", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout",
    "sliding_window",
)  # fmt: skip


def check_fused(config: Any) -> None:
    """Refuse a Phi-3 that is more than a Mistral with fused projections.

    Raises:
        ValueError: rotary positions are scaled or of a part of each head, or its residual branches have dropout.
    """
    rope = config.rope_parameters
    found = {"rope_type": rope.get("rope_type"), "partial_rotary_factor": rope.get("partial_rotary_factor")}
    found |= {name: getattr(config, name, None) for name in ("resid_pdrop", "embd_pdrop")}
    wanted = {"rope_type": "default", "partial_rotary_factor": 1.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    for name, value in found.items():
        if value not in (None, wanted[name]):
            raise ValueError(f"{name}={value!r} of the teacher cannot be carried over; only {wanted[name]!r} can.")


def unfused_config(config: Any) -> MistralConfig:
    """The configuration of the Mistral that a Phi-3 of this configuration is."""
    rope = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    fields = {name: getattr(config, name) for name in FIELDS}
    return MistralConfig(**fields, head_dim=head_dim_of(config), rope_parameters=rope)


def unfused(teacher: PreTrainedModel) -> MistralForCausalLM:
    """The same model with a matrix for each of queries, keys, values, gate and up; its matrices are views of the
    teacher's.

    Args:
        teacher: a Phi3ForCausalLM that `check_fused` does not refuse, plain and on one device.
    """
    given: Any = teacher.config
    size = head_dim_of(given)
    with torch.device("meta"):
        model = MistralForCausalLM(unfused_config(given))
    queries, keys = given.num_attention_heads * size, given.num_key_value_heads * size
    weights: dict[str, torch.Tensor] = {}
    for name, value in teacher.state_dict().items():
        if name.endswith("self_attn.qkv_proj.weight"):
            parts = zip(("q_proj", "k_proj", "v_proj"), value.split([queries, keys, keys]))
            weights |= {name.replace("qkv_proj", part): rows_of_part for part, rows_of_part in parts}
        elif name.endswith("mlp.gate_up_proj.weight"):
            parts = zip(("gate_proj", "up_proj"), value.chunk(2))
            weights |= {name.replace("gate_up_proj", part): rows_of_part for part, rows_of_part in parts}
        else:
            weights[name] = value
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(teacher.device)  # its buffers were on meta
    model.tie_weights()
    model.config.dtype = teacher.dtype
    model.generation_config = copy.deepcopy(teacher.generation_config)
    return model.eval()
