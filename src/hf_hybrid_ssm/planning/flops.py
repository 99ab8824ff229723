"""Floating point operations of a forward, for each token; a multiplication and an addition count as two.

Linear maps are read off the model; attention is counted as it is computed, block by block, masked keys included.
"""

import math

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.layers.adaptive_vocabulary import AdaptiveSoftmax
from hf_hybrid_ssm.layers.context_states import ContextStates, HeadwiseLinear
from hf_hybrid_ssm.layers.recurrent_states import RecurrentStates
from hf_hybrid_ssm.ops.legendre_memory.vectorised import BLOCK as MEMORY_BLOCK
from hf_hybrid_ssm.planning.activations import SYSTEM_BLOCK
from hf_hybrid_ssm.planning.attention import reach
from hf_hybrid_ssm.planning.presets import is_classifier

KINDS = ("projections", "attention", "memory", "recurrence", "head")


def forward_flops(model: PreTrainedModel, length: int) -> dict[str, float]:
    """Operations per token of a row of `length`, by `KINDS`; encoder-decoders: per pair of source and target token."""
    config = model.config
    found = dict.fromkeys(KINDS, 0.0)
    found["head"] = _head(model)
    found["projections"] = _projections(model, length)
    found["attention"] = _attention(config, length)
    found["memory"], found["recurrence"] = _recurrences(config, length)
    return found


def filter_flops(config: PreTrainedConfig, length: int) -> float:
    """Operations of a forward that do not grow with its tokens: kernels of filters that train, made anew each time.

    Per system: powers of A by squaring and the vectors A^j B of a block (twice: for the block, for its strides), the
    readouts C A^j, and their product. Dense powers (s4) are what it costs; diagonal ones are elementwise.

    Raises:
        ValueError: a state-space model whose filter is not planned for.
    """
    if config.model_type == "bst":
        filters = {"sh": 1, "mh": config.num_attention_heads, "mf": config.num_context_states}
        count, directions = config.block_types.count("bst") * filters[config.context_variant], 1 + config.bidirectional
    elif config.model_type in ("spade", "spade_seq2seq") and config.ssm_trainable != "none":
        encodes = is_classifier(config) or config.model_type == "spade_seq2seq"
        count, directions = len(config.global_layers), 2 if encodes else 1
    else:
        return 0.0
    if config.ssm_type not in ("s4", "s4d", "ema"):
        raise ValueError(f"ssm_type={config.ssm_type!r} is not planned for; s4, s4d and ema are.")
    states = config.ssm_state_size
    steps = 1 << (max(-(-length // SYSTEM_BLOCK), 1) - 1).bit_length()
    row = 2 * states * states if config.ssm_type == "s4" else 0  # one vector times A
    squares = 2 * (SYSTEM_BLOCK.bit_length() - 1) + steps.bit_length() - 1
    one = squares * states * row + (3 * SYSTEM_BLOCK + steps) * row + 2 * states * SYSTEM_BLOCK * (steps + 1)
    return count * directions * config.hidden_size * one


def again_flops(config: PreTrainedConfig, length: int, flops: dict[str, float], checkpointing: bool) -> float:
    """What the backward computes again: implicit attention always, and with checkpointing every layer.

    An upper bound: torch stops within a layer once all that it needs is there again.
    """
    again = _implicit_attention(config, length) if config.model_type == "lmu_isa" else 0.0
    if checkpointing:
        again += sum(flops[kind] for kind in KINDS if kind != "head")
    return again


def _head(model: PreTrainedModel) -> float:
    """Logits; an adaptive softmax: its first band, for all tokens (a rare band is computed for its own tokens)."""
    if is_classifier(model.config):
        return 0.0
    lm_head = model.lm_head
    if isinstance(lm_head, AdaptiveSoftmax):
        (embedding,) = lm_head.embedding
        return 2 * embedding.hidden_size * (embedding.bands[0] + len(embedding.bands) - 1)
    return 2 * lm_head.in_features * lm_head.out_features


def _projections(model: PreTrainedModel, length: int) -> float:
    """Two for each weight and token it meets."""
    total = 0.0
    counted: set[int] = {id(getattr(model, "lm_head", None))}
    for module in model.modules():
        if isinstance(module, (ContextStates, RecurrentStates)):
            rows = _rows_of_states(module, length)
            for child in module.children():
                if isinstance(child, (nn.Linear, HeadwiseLinear)):
                    counted.add(id(child))
                    total += 2 * child.weight.numel() * rows
    for name, module in model.base_model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in counted and not name.endswith("embed_tokens"):
            total += 2 * module.weight.numel()
    return total


def _rows_of_states(module: ContextStates | RecurrentStates, length: int) -> float:
    """Context states for each token: all filters at each block's end, and the initial ones; else one a token."""
    blocks = -(-length // module.window)
    if isinstance(module, RecurrentStates):
        return module.num_states * blocks / length
    if module.variant == "mf":  # one state for each filter and block that ends in the row, and the initial ones
        return module.num_states * (length // module.window + 1) / length
    return 1.0


def _attention(config: PreTrainedConfig, length: int) -> float:
    """Scores and weighted sums: 4 for each number of a head and each key."""
    if config.model_type == "longhorn":
        inner = config.num_attention_heads * config.head_dim
        windows = {"full_attention": None, "sliding_attention": config.sliding_window - 1}
        kinds = [windows[kind] for kind in config.block_types if kind in windows]
        return sum(4 * inner * reach(length, 0, farthest).keys for farthest in kinds)
    if config.model_type == "bst":
        inner = config.num_attention_heads * config.head_dim
        nearest = -config.window_size if config.bidirectional else 0 if config.attend_self else 1
        own = 4 * inner * reach(length, nearest, config.window_size).keys * config.num_hidden_layers
        slots = config.num_context_states if config.context_variant == "mf" else config.window_size
        padded = -(-length // config.window_size) * config.window_size / length
        own += 4 * inner * slots * padded * config.block_types.count("bst")
        # states meet themselves and the tokens of two blocks; tokens meet the states
        states, blocks = config.recurrent_num_states, -(-length // config.window_size)
        updates = states * (states + 2 * config.window_size) * (length // config.window_size) / length
        met = updates + states * blocks * config.window_size / length
        return own + 4 * inner * met * config.block_types.count("brect")
    if config.model_type == "lmu_isa":
        if config.pre_block == "ffn":
            return 0.0
        farthest = config.sliding_window - 1 if config.pre_block == "window_attention" else None
        return 4 * config.hidden_size * reach(length, 0, farthest).keys * config.num_hidden_layers
    if config.model_type == "spade":
        causal = not is_classifier(config)
        return config.num_hidden_layers * 4 * config.hidden_size * _spade_keys(config, length, causal)
    decoder = config.decoder_config()
    keys = config.num_hidden_layers * _spade_keys(config, length, False)
    keys += config.num_decoder_layers * (_spade_keys(decoder, length, True) + length)  # and the cross-attention
    return 4 * config.hidden_size * keys


def _spade_keys(config: PreTrainedConfig, length: int, causal: bool) -> float:
    if config.attention_type == "full":
        return length
    farthest = config.chunk_size - 1 if config.attention_type == "chunk" else config.local_radius
    chunk_size = config.chunk_size if config.attention_type == "chunk" else None
    return reach(length, 0 if causal else -farthest, farthest, chunk_size).keys


def _recurrences(config: PreTrainedConfig, length: int) -> tuple[float, float]:
    """Matrix products of a memory, and the elementwise work of recurrences and Fourier transforms."""
    if config.model_type == "longhorn":
        # each number of the state: square of the key, decay (2), written value (2), update (2), read-out (2)
        scan = 9 * config.intermediate_size * config.state_size
        convolution = 2 * config.intermediate_size * config.conv_kernel
        return 0.0, (scan + convolution) * config.block_types.count("linear_attention")
    if config.model_type == "lmu_isa":
        width, order = config.hidden_size, config.lmu_order
        states = 2 * width * order + 2 * width * order * order / MEMORY_BLOCK  # tokens in, memory from block to block
        return (states + _implicit_attention(config, length) / config.num_hidden_layers) * config.num_hidden_layers, 0
    if config.model_type == "bst":
        filters = {"sh": 1, "mh": config.num_attention_heads, "mf": config.num_context_states}
        count, filters = config.block_types.count("bst"), filters[config.context_variant]
        if config.context_variant == "mf":
            return count * _block_states(config, filters), 0.0
        return 0.0, count * _fourier(config, length, filters)
    global_layers = len(config.global_layers) + len(getattr(config, "decoder_global_layers", ()))
    return 0.0, global_layers * _fourier(config, length, 1)


def _fourier(config: PreTrainedConfig, length: int, filters: int) -> float:
    """Real transforms of 2 L points, 2.5 n log2 n each: of the input, and back for each filter."""
    points = 2 * length
    return config.hidden_size * (1 + filters) * 2.5 * points * math.log2(points) / length


def _block_states(config: PreTrainedConfig, filters: int) -> float:
    """Of states at block borders: tokens into the state; where windows are no whole blocks, all outputs besides."""
    products = 2 * filters * config.hidden_size * config.ssm_state_size
    if config.window_size % SYSTEM_BLOCK:
        products += products + 2 * filters * config.hidden_size * SYSTEM_BLOCK
    return products


def _implicit_attention(config: PreTrainedConfig, length: int) -> float:
    """Rows of queries, keys and values from a block's tokens and memory, and attention among the rows."""
    width, reduced = config.hidden_size, config.lmu_reduced_order
    rows = 2 * 3 * reduced * (MEMORY_BLOCK + config.lmu_order) * width
    attention = 2 * reduced * reduced * width + 2 * reduced * (reduced + width)
    filled = -(-length // MEMORY_BLOCK) * MEMORY_BLOCK / length
    return (rows + attention) * filled * config.num_hidden_layers
