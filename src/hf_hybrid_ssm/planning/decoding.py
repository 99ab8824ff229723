"""The state that one sequence holds while it is decoded, as the cache of `generate` keeps it."""

from transformers import Cache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.layers.mixer import Mixer
from hf_hybrid_ssm.models.cache import StateLayer
from hf_hybrid_ssm.planning.setup import DTYPE_BYTES

SEEN = 8  # an int64 in each attention layer: tokens seen so far


def decoding_state_bytes(model: PreTrainedModel, length: int, dtype: str) -> int:
    """Bytes of the cache of one sequence after `length` tokens (an encoder-decoder: of source and target each).

    Only full attention makes it depend on the length. Windows hold their keys and values from the start; recurrences
    stay in float32.

    Raises:
        ValueError: retrieval, which is not planned for.
    """
    config, c = model.config, DTYPE_BYTES[dtype]
    if config.model_type == "longhorn":
        return sum(_longhorn_layer(config, kind, length, c) for kind in config.block_types)
    if config.model_type == "bst":
        return _bst(config, c) + _mixers(model)
    if config.model_type == "lmu_isa":
        held = config.lmu_order * config.hidden_size * 4
        if config.pre_block != "ffn":
            window = config.pre_block == "window_attention"
            held += _window(config.hidden_size, config.sliding_window - 1 if window else length, c)
        return held * config.num_hidden_layers
    if config.model_type == "spade":
        return config.num_hidden_layers * _spade_layer(config, length, c) + _mixers(model)
    decoder = config.decoder_config()
    cross = 2 * config.hidden_size * length * c
    return config.num_decoder_layers * (_spade_layer(decoder, length, c) + cross) + _mixers(model.model.decoder)


def _window(width: int, tokens: int, c: int) -> int:
    """Keys and values of so many tokens."""
    return 2 * width * tokens * c + SEEN


def _longhorn_layer(config: PreTrainedConfig, kind: str, length: int, c: int) -> int:
    if kind == "linear_attention":
        return config.intermediate_size * ((config.conv_kernel - 1) * c + config.state_size * 4)
    width = config.num_key_value_heads * config.head_dim
    return 2 * width * length * c if kind == "full_attention" else _window(width, config.sliding_window - 1, c)


def _spade_layer(config: PreTrainedConfig, length: int, c: int) -> int:
    tokens = {"full": length, "chunk": config.chunk_size - 1, "window": config.local_radius}[config.attention_type]
    return _window(config.hidden_size, tokens, c)


def _bst(config: PreTrainedConfig, c: int) -> int:
    if config.retrieval_k is not None:
        raise ValueError("retrieval is not planned for.")
    inner = config.num_attention_heads * config.head_dim
    slots = config.num_context_states if config.context_variant == "mf" else config.window_size
    own = config.num_hidden_layers * _window(inner, config.window_size, c)
    # recurrent states, their keys and values, and the keys and values of two blocks of tokens
    recurrent = config.recurrent_num_states * (config.hidden_size + 2 * inner) + 4 * inner * config.window_size
    return (
        own + (config.block_types.count("bst") * 2 * inner * slots + config.block_types.count("brect") * recurrent) * c
    )


def _mixers(module: PreTrainedModel) -> int:
    """The states of the state-space models, as these say themselves."""
    total = 0
    for mixer in module.modules():
        if isinstance(mixer, Mixer):
            state = mixer.init_state(1, device="meta")
            parts = (state,) if not isinstance(state, tuple) else state
            total += sum(part.numel() * part.element_size() for part in parts)
    return total


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a real cache holds."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    total = 0
    for layer in cache.layers:
        held = layer.states.values() if isinstance(layer, StateLayer) else (layer.keys, layer.values)
        total += sum(tensor.numel() * tensor.element_size() for tensor in held)
    return total
