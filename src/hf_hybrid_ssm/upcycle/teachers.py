"""Which models can be upcycled, and what their configurations say of attention."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that a teacher can be refused before anything is imported
    from transformers import PreTrainedConfig

TEACHERS = ("llama", "mistral", "qwen2", "qwen3")
FUSED = ("phi3",)
"""Models that become one of these as they are loaded."""
UNSUPPORTED_REASONS = {
    "gemma": "norms that multiply by 1 + weight, and scaled embeddings",
    "gemma2": "norms after each layer, and scores and logits that are capped",
    "gemma3_text": "norms after each layer, and two rotary bases",
    "gpt2": "learned positions, LayerNorm and a feed-forward layer without a gate",
    "gpt_neox": "LayerNorm, parallel layers and partly rotated heads",
    "granite": "multipliers of embeddings, scores, residual branches and logits",
    "mixtral": "experts",
    "olmo2": "norms after each layer",
    "phi": "LayerNorm, parallel layers and partly rotated heads",
    "phi3": "fused projections, which load_teacher(FOLDER) splits",
    "qwen3_moe": "experts",
    "smollm3": "layers without rotary positions",
}
"""What a student would need, by model type; for models that people ask about."""
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Of these the frequencies are the same for every text; others' change with its length, under keys that are cached."""


def check_model_type(config: "PreTrainedConfig") -> None:
    """Refuse an architecture that is not one of `TEACHERS`.

    Raises:
        ValueError: names what is missing.
    """
    kind = config.model_type
    if kind not in TEACHERS:
        reason = UNSUPPORTED_REASONS.get(
            kind, "it is not known to be made of RMSNorm, rotary attention and a gated SiLU layer"
        )
        raise ValueError(f"model_type={kind!r} cannot be upcycled: {reason}. Known: {', '.join(TEACHERS)}.")


def check_teacher(config: "PreTrainedConfig") -> None:
    """Refuse a model whose layers a student cannot hold.

    Raises:
        ValueError: names what is missing.
    """
    check_model_type(config)
    for name, wanted in (("hidden_act", "silu"), ("mlp_bias", False), ("partial_rotary_factor", 1.0)):
        if (value := getattr(config, name, None)) not in (None, wanted):
            raise ValueError(f"{name}={value!r} of the teacher cannot be carried over; only {wanted!r} can.")
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ROTARY_TYPES:
        raise ValueError(
            f"rope_type={kind!r} of the teacher cannot be carried over: it rotates by other frequencies in longer "
            f"texts. Set rope_type to one of {', '.join(map(repr, ROTARY_TYPES))} in its rope_parameters; 'default' "
            "gives what it computes in short texts."
        )
    value = getattr(config, "quantization_config", None)
    method = value.get("quant_method") if isinstance(value, dict) else getattr(value, "quant_method", None)
    if value is not None and method != "gguf":  # a GGUF file's weights are plain once they are loaded
        method = method if isinstance(value, dict) else type(value).__name__
        raise ValueError(
            f"quantization_config ({method}) of the teacher cannot be carried over: call its dequantize() first."
        )


def attention_types(config: "PreTrainedConfig") -> list[str]:
    """ "full_attention" or "sliding_attention" for each layer of the teacher."""
    count = config.num_hidden_layers
    if (named := getattr(config, "layer_types", None)) is not None:
        return list(named)
    slides = config.model_type == "mistral" and config.sliding_window is not None
    return ["sliding_attention" if slides else "full_attention"] * count


def has_attention_bias(config: "PreTrainedConfig") -> bool:
    """Qwen2 has biases on queries, keys and values without saying so."""
    return config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
