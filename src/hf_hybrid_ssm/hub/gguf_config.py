"""What a GGUF file says of a model, as fields of its configuration in transformers. Imports no library.

llama.cpp defines what a key means, and what holds where it is absent. Every key of the architecture is read or known
to change no number; any other is refused by name.
"""

import math
import struct
from typing import Any

from hf_hybrid_ssm.hub.gguf_header import GgufHeader
from hf_hybrid_ssm.hub.saved_configuration import check_sizes

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma3": "gemma3_text"}
"""Architecture of a GGUF file → `model_type` in transformers. Another one is a line here once its keys, its tensors
and its numbers have been compared with the model's folder."""
BIAS_FIELDS = {
    "attention_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
    "mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
}
"""Field of a configuration → the tensors of a layer that are there with it."""
OPTIONAL_BIASES = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "gemma3": ("attention_bias",),
}
SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
WITHOUT_EFFECT = (
    "vocab_size",  # the embeddings have it
    "rope.scaling.finetuned", "rope.scaling.original_context_length",  # of scaling that is refused
    "tensor_data_layout",
)  # fmt: skip
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
THETA = 10000.0
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's scaling of positions, of which a GGUF file holds what comes out for each frequency."""
GEMMA3_27B = 62  # layers; it alone scales its scores by the width of a head without key_length
GEMMA3_PATTERN = 6  # every sixth layer sees all tokens
INSTEAD = "give the folder of the model instead"


def config_fields(header: GgufHeader) -> dict[str, Any]:
    """`model_type` and the fields of a configuration, complete: nothing is left to the defaults of a class that a file
    of this architecture says, or that llama.cpp takes for granted.

    Raises:
        ValueError: the file is no model, of another architecture, has a key that is not read, or says something
            that transformers cannot compute. Names the key.
    """
    where, architecture = str(header.path), header.architecture
    if (kind := header.fields.get("general.type", "model")) != "model":
        raise ValueError(f"{where!r} says general.type={kind!r}, and a model is wanted.")
    if architecture not in MODEL_TYPES:
        raise ValueError(
            f"{where!r} is of the architecture {architecture!r}, and GGUF files of {', '.join(MODEL_TYPES)} are read: "
            f"{INSTEAD}."
        )
    keys = _Keys(header)
    fields: dict[str, Any] = {"model_type": MODEL_TYPES[architecture]}
    fields |= {field: keys.integer(name, least=1) for name, field in SIZES.items()}
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    fields["num_key_value_heads"] = keys.integer("attention.head_count_kv", heads, least=1)
    fields["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    size = keys.integer("attention.key_length", width // heads, least=1)
    fields["head_dim"] = size
    for name, default in (("attention.value_length", width // heads), ("rope.dimension_count", size)):
        if (found := keys.integer(name, default)) != size:
            raise ValueError(
                f"{where!r}: {keys.prefix}{name}={found}, and heads of {size} are not read so: {INSTEAD}."
            )
    if not keys.take("attention.causal", True):
        raise ValueError(f"{where!r}: {keys.prefix}attention.causal=False, and a model that writes is wanted.")
    rotary = _rotary(header, keys, size)
    fields["rope_parameters"] = rotary
    for field in OPTIONAL_BIASES.get(architecture, ()):
        fields[field] = any(name.endswith(BIAS_FIELDS[field]) for name in header.tensors)
    if architecture == "phi3":
        fields["sliding_window"] = keys.integer("attention.sliding_window", 0) or None
    if architecture == "gemma3":
        fields |= _gemma3_fields(keys, fields, rotary)
    fields |= _vocabulary(header)
    keys.refuse_the_rest()
    try:
        check_sizes(fields)
    except ValueError as error:
        raise ValueError(f"{where!r}: {error}") from error
    return fields


class _Keys:
    """The keys of an architecture, each to be taken once."""

    def __init__(self, header: GgufHeader):
        self.where, self.prefix = str(header.path), f"{header.architecture}."
        self.left = {
            key.removeprefix(self.prefix): value for key, value in header.fields.items() if key.startswith(self.prefix)
        }

    def take(self, name: str, default: Any = None) -> Any:
        return self.left.pop(name, default)

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        value = self.take(name, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # of each layer
        if value is None or isinstance(value, bool) or not isinstance(value, int) or value < least:
            wanted = f"one whole number of at least {least}"
            raise ValueError(f"{self.where!r}: {self.prefix}{name}={value!r}, and {wanted} was expected.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.where!r}: {self.prefix}{name}={value!r}, and a number was expected.")
        return float(value)

    def refuse_the_rest(self) -> None:
        for name in WITHOUT_EFFECT:
            self.left.pop(name, None)
        for name in ("expert_count", "expert_used_count"):
            if self.left.get(name) == 0:
                del self.left[name]
        if self.left:
            name, value = min(self.left.items())
            shown = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise ValueError(
                f"{self.where!r}: {self.prefix}{name}={shown} is not read from a GGUF file, and may change what the "
                f"model computes: {INSTEAD}."
            )


def _rotary(header: GgufHeader, keys: _Keys, size: int) -> dict[str, Any]:
    """Rotary positions: with a factor and no type they are scaled linearly."""
    where = str(header.path)
    theta = keys.number("rope.freq_base", THETA)
    kind, factor = keys.take("rope.scaling.type", "linear"), keys.number("rope.scaling.factor", 0.0)
    oldest = keys.number("rope.scale_linear", 0.0)
    factor = factor or oldest
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{where!r} scales its rotary positions ({keys.prefix}rope.scaling.type={kind!r}): {INSTEAD}."
        )
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    is_scaled = kind == "linear" and factor not in (0.0, 1.0)
    if is_scaled:
        rotary |= {"rope_type": "linear", "factor": factor}
    if FREQUENCIES in header.tensors:
        scaling = _llama3_scaling(header, theta, size)
        if is_scaled or scaling is None:
            raise ValueError(
                f"{where!r} scales its rotary positions ({FREQUENCIES}) in another way than Llama 3: {INSTEAD}."
            )
        rotary |= scaling
    return rotary


FREQUENCIES = "rope_freqs.weight"


def _llama3_scaling(header: GgufHeader, theta: float, size: int) -> dict[str, Any] | None:
    """Llama 3's scaling that gives the factors of the frequencies which the file holds; None if none does."""
    tensor = header.tensors[FREQUENCIES]
    if tensor.kind != 0 or tensor.shape != (size // 2,):  # float32
        return None
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        found = struct.unpack(f"<{size // 2}f", file.read(2 * size))
    low, high, length = LLAMA3.values()
    factor = max(found)
    for index, value in enumerate(found):
        wavelength = 2 * math.pi * theta ** (2 * index / size)
        smooth = min(1.0, max(0.0, (length / wavelength - low) / (high - low)))
        if not math.isclose(value, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-5):
            return None
    return {"rope_type": "llama3", "factor": factor} | LLAMA3


def _gemma3_fields(keys: _Keys, fields: dict[str, Any], rotary: dict[str, Any]) -> dict[str, Any]:
    layers, window = fields["num_hidden_layers"], keys.integer("attention.sliding_window", 0)
    pattern = keys.integer("attention.sliding_window_pattern", GEMMA3_PATTERN)
    local = keys.number("rope.freq_base_swa", THETA)
    slides = [window > 0 and bool((layer + 1) % max(1, pattern)) for layer in range(layers)]
    is_27b = layers == GEMMA3_27B
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "sliding_window": window or None,
        "rope_parameters": {
            "full_attention": rotary,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]
        if is_27b
        else fields["head_dim"],
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }


def _vocabulary(header: GgufHeader) -> dict[str, Any]:
    """Sizes and special tokens. The head is the embeddings where it has no tensor of its own."""
    where, tensors = str(header.path), header.tensors
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{where!r} lacks token_embd.weight, the embeddings: it is not a whole model.")
    rows = tensors["token_embd.weight"].shape[0]
    tokens = header.fields.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) != rows:
        raise ValueError(f"{where!r} has {len(tokens):,} tokens and {rows:,} embeddings.")
    ids = {field: header.fields.get(f"tokenizer.ggml.{key}") for field, key in TOKENS.items()}
    for field, token in ids.items():
        if token is not None and not 0 <= token < rows:
            raise ValueError(f"{where!r}: tokenizer.ggml.{TOKENS[field]}={token} lies beyond its {rows:,} tokens.")
    return {"vocab_size": rows, "tie_word_embeddings": "output.weight" not in tensors} | ids
