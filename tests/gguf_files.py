"""Models of transformers as GGUF files, with the keys and tensors that llama.cpp's converter writes."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Q4_1, F32 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.F32
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma3_text": "gemma3"}
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 2.0**-20, "bos_token_id": 3,
    "eos_token_id": 5, "pad_token_id": None,
}  # fmt: skip
THETA = {"rope_theta": 20000.0, "rope_type": "default"}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA = (LlamaConfig, LlamaForCausalLM)
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (*LLAMA, {"rope_parameters": THETA, "tie_word_embeddings": True}),
    "llama with biases": (*LLAMA, {"attention_bias": True}),
    "llama with all biases": (*LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama, linear positions": (*LLAMA, {"rope_parameters": LINEAR}),
    "llama 3": (*LLAMA, {"rope_parameters": LLAMA3, "hidden_size": 64, "head_dim": 64}),
    "llama, wide heads": (*LLAMA, {"head_dim": 24, "num_key_value_heads": 4}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": THETA}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 9}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 24, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 24,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
}  # fmt: skip
"""A model for each architecture and each thing that a file may say, as transformers makes it."""


def model_of(name: str):
    """A random one, no tensor of which is what it would be at first."""
    torch.manual_seed(0)
    config, model_class, fields = MODELS[name]
    model = model_class(config(**SIZES | fields)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    return model


def keys_of(config) -> dict[str, Any]:
    """After the architecture → value."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head,
        "vocab_size": config.vocab_size,
    }
    if head * config.num_attention_heads != config.hidden_size:
        keys |= {"attention.key_length": head, "attention.value_length": head}
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if config.model_type in ("phi3", "gemma3_text"):
        keys["attention.sliding_window"] = config.sliding_window
    return keys


def tensors_of(model) -> dict[str, torch.Tensor]:
    """Name in a GGUF file → values, as llama.cpp's converter gives them."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    kind = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    found = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, part = name.rpartition(".")
        found[f"{names.get_name(stem)}.{part}"] = _as_in_gguf(name, value.detach(), config, architecture)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = torch.tensor(
            [_slower(rope, index / config.head_dim) for index in range(0, config.head_dim, 2)]
        )
    return found


def _slower(rope: dict[str, Any], power: float) -> float:
    """How many times as slow Llama 3's scaling makes a frequency, in the converter's three cases."""
    length = 2 * math.pi * rope["rope_theta"] ** power
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    if length < context / high:
        return 1.0
    if length > context / low:
        return rope["factor"]
    smooth = (context / length - low) / (high - low)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _as_in_gguf(name: str, value: torch.Tensor, config, architecture: str) -> torch.Tensor:
    """A Llama's file rotates neighbours, where transformers rotates halves: rows of queries and keys change places.
    The norms of a Gemma multiply by what is in the file."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if architecture == "llama" and f".{part}." in name:
            return value.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(value.shape).contiguous()
    if architecture == "gemma3" and "norm.weight" in name:
        return value + 1
    return value.contiguous()


def write_model(
    path: Path,
    model,
    tokenizer=None,
    quantized: bool = False,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write a model, and what else is to stand in the file or, given as None, not to stand there.

    Args:
        quantized: matrices in blocks of four bits.
        keys: whole names of keys and their values.
        tensors: name → values.
        architecture: what the file says that it holds.
    """
    own = ARCHITECTURES[model.config.model_type]
    architecture = architecture or own
    writer = GGUFWriter(path, architecture)
    said = {f"{architecture}.{name}": value for name, value in keys_of(model.config).items()}
    tokens = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    said |= {f"tokenizer.ggml.{name}": value for name, value in tokens.items()}
    said |= ({} if tokenizer is None else tokenizer_keys(tokenizer)) | (keys or {})
    for key, value in said.items():
        _add(writer, key, value)
    for name, value in (tensors_of(model) | (tensors or {})).items():
        if value is not None:
            kind = Q4_1 if quantized and value.dim() == 2 and value.shape[1] % 32 == 0 else F32
            writer.add_tensor(name, quants.quantize(value.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        kinds[type(value)](key, value)


def tokenizer_keys(tokenizer) -> dict[str, Any]:
    """Of a byte-level tokenizer."""
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.all_special_tokens)
    keys = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [int(TokenType.CONTROL if token in special else TokenType.NORMAL) for token in tokens],
        "merges": [" ".join(pair) for pair in vocabulary["merges"]],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "padding_token_id": tokenizer.pad_token_id,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()} | {
        "tokenizer.chat_template": tokenizer.chat_template
    }
