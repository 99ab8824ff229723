"""What the forward keeps for the backward, in bytes, layer by layer.

Every term is a tensor that autograd saves, with the op that saves it beside it. A width counts numbers for each token;
`c` is the size of a number that projections compute with, `w` that of the numbers which stay in float32 at least
(normalisation statistics, recurrences and, on CPUs, attention).
"""

from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from hf_hybrid_ssm.ops.legendre_memory.vectorised import BLOCK as MEMORY_BLOCK
from hf_hybrid_ssm.planning.attention import Reach, reach
from hf_hybrid_ssm.planning.presets import is_classifier
from hf_hybrid_ssm.planning.setup import Setup

SCAN_CHECKPOINT = 32  # tokens between the states that the fused scan keeps
SYSTEM_BLOCK = 64  # tokens of a block of a state-space model


class Kept(NamedTuple):
    """Bytes for each token of the batch, and bytes that do not depend on the batch (filters, masks)."""

    per_token: float
    once: float = 0.0

    def __add__(self, other: "Kept") -> "Kept":  # type: ignore[override]
        return Kept(self.per_token + other.per_token, self.once + other.once)


def layers(config: PreTrainedConfig, setup: Setup) -> list[tuple[Kept, float]]:
    """For each layer, what it keeps, and the bytes per token of its input (all that checkpointing keeps of it).

    Raises:
        ValueError: a state-space model whose filter is not planned for.
    """
    c, w = setup.computing, max(setup.computing, 4)
    count = range(config.num_hidden_layers)
    if config.model_type == "longhorn":
        stream = w if config.residual_in_fp32 else c
        return [(_longhorn(config, setup, index, c, w), stream * config.hidden_size) for index in count]
    # under autocast the residual stream stays in float32: a norm's output is, and the embeddings are
    r = w if setup.mixed else c
    if config.model_type == "bst":
        return [(_bst(config, setup, index, c, w, r), r * config.hidden_size) for index in count]
    if config.model_type == "lmu_isa":
        return [(_lmu_isa(config, setup, c, w, r), r * config.hidden_size) for index in count]
    causal = config.model_type == "spade" and not is_classifier(config)
    found = [(_spade(config, setup, index, causal, c, w, r), r * config.hidden_size) for index in count]
    if config.model_type == "spade_seq2seq":
        decoder = config.decoder_config()
        for index in range(config.num_decoder_layers):
            kept = _spade(decoder, setup, index, True, c, w, r) + _cross_attention(decoder, setup, c, w, r)
            found.append((kept, 2 * r * config.hidden_size))  # its input, and the encoder's states
    return found


def head(config: PreTrainedConfig, setup: Setup) -> Kept:
    """The last norm and the input of the head; logits are counted apart."""
    c, w = setup.computing, max(setup.computing, 4)
    dropout = c if getattr(config, "final_dropout", 0) else 0  # its mask
    return Kept((w + 2 * c + dropout) * config.hidden_size + 8)


def _attention(
    setup: Setup, where: Reach, heads: int, inner: int, w: int, *, dropout: float, keeps_scores: bool, bias: bool
) -> Kept:
    """`local_attention`: queries, keys and values in blocks, then scores or output.

    torch's fused attention keeps its output and a number for each query and head. With plain torch, dropout and zero
    keys before the start (`keeps_scores`) take the path that keeps the weights, and with dropout their mask and what
    it leaves of them. Tables of booleans and bias by distance are shared by the rows.
    """
    tensors = inner + 2 * inner * where.copies
    if setup.kernels == "torch" and (keeps_scores or dropout):
        tensors += heads * where.keys * (3 if dropout else 1)
    else:
        tensors += inner + heads
    size = where.keys / where.copies  # queries of a block
    return Kept(w * tensors, size * where.keys * (2 + (w * heads if bias else 0)))


def _longhorn(config: PreTrainedConfig, setup: Setup, index: int, c: int, w: int) -> Kept:
    width, channels, states = config.hidden_size, config.intermediate_size, config.state_size
    norm = Kept(w * (2 * width + 1) + c * width)  # RMSNorm: input, statistic, normalised; then the projection's input
    mixing = Kept(0)
    if config.block_types[index] != "linear_attention":
        sliding = config.block_types[index] == "sliding_attention"
        where = reach(setup.length, 0, config.sliding_window - 1 if sliding else None)
        inner, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        options = {"dropout": config.attention_dropout, "keeps_scores": False, "bias": False}
        mixing = _attention(setup, where, config.num_attention_heads, inner, w, **options)
        mixing += Kept(c * (inner + kv) + c * inner)  # rotated queries and keys, the output's projection
    else:
        ranks = config.time_step_rank + 2 * states
        mixing = Kept(c * (channels + ranks))  # inputs of out_proj, of dt_proj
        if setup.kernels == "torch":
            # convolution (padded input, before SiLU, output), gate (a view of in_proj's output, hence twice as wide),
            # tau, y before the gate, silu(gate); what is not yet float32 is copied for the scan
            mixing += Kept(c * 5 * channels + w * 3 * channels)
            mixing += Kept(0 if c == w else w * (2 * channels + 2 * states))
        else:
            # convolution (input, output), scan (values, step, gate, keys, queries, states every so many tokens)
            scan = 2 * channels + 2 * states + states * channels / SCAN_CHECKPOINT
            mixing += Kept((w + c) * channels + w * scan + (0 if c == w else w * channels))
    if config.mlp_intermediate_size is None:
        return norm + mixing
    mlp = config.mlp_intermediate_size
    return norm + mixing + norm + Kept(c * 4 * mlp)  # gate, silu(gate), up, their product


def _spade(config: PreTrainedConfig, setup: Setup, index: int, causal: bool, c: int, w: int, r: int) -> Kept:
    width, inner = config.hidden_size, config.intermediate_size
    norm = Kept(r * width + 2 * w)  # input and statistics
    kept = norm + Kept(2 * c * width)  # q, k, v share an input; o_proj
    farthest: int | None = config.local_radius
    nearest: int | None = 0 if causal else -config.local_radius
    chunk_size = None
    if config.attention_type == "full":
        nearest, farthest = 0 if causal else None, None
    elif config.attention_type == "chunk":
        chunk_size = config.chunk_size
        nearest, farthest = 0 if causal else 1 - chunk_size, chunk_size - 1
    where = reach(setup.length, nearest, farthest, chunk_size)
    bias = config.relative_bias_scope != "none"
    options: dict[str, Any] = {"dropout": config.attention_dropout, "keeps_scores": False, "bias": bias}
    kept += _attention(setup, where, config.num_attention_heads, width, w, **options)
    if index in config.global_layers:
        kept += _filter(config, setup, config.ssm_type, config.ssm_trainable != "none", 1, not causal)
        kept += Kept(2 * r * width + 2 * 2 * w + 2 * c * width)  # two norms, the product that joins the branches
    kept += norm + Kept(c * width)  # fc1
    kept += Kept(c * inner * (1 if config.hidden_act == "relu" else 2))  # ReLU keeps its output, which fc2 keeps too
    kept += Kept(c * inner * (2 if config.activation_dropout else 0))  # its mask, what it leaves
    return kept + Kept(c * width * (2 if config.dropout else 0))  # masks of both branches


def _cross_attention(config: PreTrainedConfig, setup: Setup, c: int, w: int, r: int) -> Kept:
    width, heads = config.hidden_size, config.num_attention_heads
    kept = Kept(r * width + 2 * w + 2 * c * width)  # norm, q, o_proj; the encoder's states are there already
    if setup.kernels == "torch" and config.attention_dropout:
        kept += Kept(c * 3 * width + w * 3 * heads * setup.length)
    else:
        kept += Kept(c * 4 * width + w * heads)
    return kept + Kept(c * width if config.dropout else 0)


def _bst(config: PreTrainedConfig, setup: Setup, index: int, c: int, w: int, r: int) -> Kept:
    width, heads = config.hidden_size, config.num_attention_heads
    inner = heads * config.head_dim
    norm = Kept(w * (2 * width + 1) + (c * width if config.dropout else 0))  # RMSNorm, a mask of dropout
    kept = norm + Kept(c * width)  # q, k, v share an input
    if config.qk_norm:
        kept += Kept(w * (2 * inner + 2 * heads) + c * inner)  # projections, norms, queries before their scale
    two_sided = config.bidirectional
    nearest = -config.window_size if two_sided else 0 if config.attend_self else 1
    where = reach(setup.length, nearest, config.window_size)
    zero_keys = config.zero_kv_sink and not two_sided
    options = {"dropout": config.attention_dropout, "keeps_scores": zero_keys, "bias": True}
    kept += _attention(setup, where, heads, inner, w, **options)
    if zero_keys and setup.kernels == "torch":
        kept += Kept(where.keys)  # which keys each query may see
    block_type = config.block_types[index]
    if block_type == "bst":
        kept += _context(config, setup, c, w, r)
    elif block_type == "brect":
        kept += _recurrent(config, c, w, r)
    kept += Kept(c * inner * (1 if block_type == "slide" else 2))  # o_proj
    return kept + norm + Kept(c * (width + config.intermediate_size))  # fc1; ReLU's output is fc2's input


def _context(config: PreTrainedConfig, setup: Setup, c: int, w: int, r: int) -> Kept:
    """A layer's state-space model, and the attention to what it says of the past."""
    width, heads = config.hidden_size, config.num_attention_heads
    inner, window = heads * config.head_dim, config.window_size
    filters = {"sh": 1, "mh": heads, "mf": config.num_context_states}[config.context_variant]
    # states of a token: one for each filter, or ("mf") all filters at the end of each block only
    states = filters / window if config.context_variant == "mf" else filters
    slots = states if config.context_variant == "mf" else 1.0
    kept = Kept(w * (width + 1)) if config.ssm_input_norm else Kept(0)
    kept += _filter(config, setup, config.ssm_type, True, filters, config.bidirectional)
    if config.context_variant == "mf":  # block by block: tokens, states at the borders, matrices of a block
        n, inside = config.ssm_state_size, 0 if window % SYSTEM_BLOCK == 0 else SYSTEM_BLOCK
        borders = 2 * filters * n * width / SYSTEM_BLOCK
        kept += Kept(w * (width + borders), w * filters * width * SYSTEM_BLOCK * (inside + n))
    kept += Kept(states * (w * (2 * width + 1) + c * width))  # norm, projections
    kept += Kept(slots * (w * (inner + heads)))  # keys before their norm
    kept += Kept(w * (inner + heads) + c * inner)  # queries: norm, scale
    kept += Kept(w * (2 * inner + heads + 2 * slots * inner))  # attention: queries, output, keys, values
    return kept


def _recurrent(config: PreTrainedConfig, c: int, w: int, r: int) -> Kept:
    """A layer's recurrent states, read and rewritten at every block."""
    width, heads = config.hidden_size, config.num_attention_heads
    inner, rows = heads * config.head_dim, config.recurrent_num_states / config.window_size  # states for each token
    state = w * (2 * width + 1) + c * width  # norm; projections share an input
    state += 3 * w * (inner + heads) + 2 * c * inner  # keys and two queries: norms, scales
    state += w * (5 * inner + 2 * heads) + c * 2 * inner  # two attentions: queries, outputs, values; o_proj
    state += r * 3 * width  # the gated sum
    tokens = w * 4 * inner  # keys and values of this block and the one before
    reading = w * (3 * inner + 2 * heads + 2 * rows * inner) + c * inner  # queries: norm, scale; attention
    return Kept(rows * state + tokens + reading)


def _filter(config: PreTrainedConfig, setup: Setup, kind: str, trains: bool, filters: int, two_sided: bool) -> Kept:
    """A long convolution keeps its input and its kernel; a kernel that trains, also the powers it is made from."""
    if kind not in ("s4", "s4d", "ema"):
        raise ValueError(f"ssm_type={kind!r} is not planned for; s4, s4d and ema are.")
    directions, width, states = (2 if two_sided else 1), config.hidden_size, config.ssm_state_size
    w = max(setup.computing, 4)
    kernel = directions * filters * width * setup.length
    if not trains:
        return Kept(w * width, w * kernel)
    strides = setup.length / SYSTEM_BLOCK
    # vectors A^j B of a block, kept by each doubling of their number and by the kernel's product; readouts likewise
    vectors = states * (4.5 * SYSTEM_BLOCK + 2 * strides)
    if kind == "s4":  # dense powers, by squaring
        vectors += states * states * (6 + SYSTEM_BLOCK.bit_length() + max(int(strides), 1).bit_length())
    return Kept(w * width, w * (kernel + directions * filters * width * vectors))


def _lmu_isa(config: PreTrainedConfig, setup: Setup, c: int, w: int, r: int) -> Kept:
    width, order, rows = config.hidden_size, config.lmu_order, 3 * config.lmu_reduced_order
    kept = Kept(3 * (r * width + 2 * w))  # three norms
    dropout = c * width if config.hidden_dropout else 0
    if config.pre_block == "ffn":
        kept += Kept(c * (width + 2 * config.pre_intermediate_size))  # fc1, activation, fc2
    else:
        farthest = config.sliding_window - 1 if config.pre_block == "window_attention" else None
        where = reach(setup.length, 0, farthest)
        options = {"dropout": config.attention_dropout, "keeps_scores": False, "bias": False}
        kept += _attention(setup, where, config.num_attention_heads, width, w, **options) + Kept(2 * c * width)
    # tokens and the memory at the start of each block; queries, keys and values are computed again in the backward
    kept += Kept(w * (width + order * width / MEMORY_BLOCK))
    matrix = MEMORY_BLOCK * rows * (MEMORY_BLOCK + order)  # what a block's tokens and its memory mean for its rows
    kept += Kept(0, w * matrix)
    return kept + Kept(c * (width + 2 * config.post_intermediate_size) + 3 * dropout)
