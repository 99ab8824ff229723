# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: bddba762a14c8de5b80894b080a79fa5b8885da10ad5dea08c52e5c59d756d28

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .dispatch import (
    Op, REGISTRY, check_lengths, check_seq_idx, check_tensor, draw, is_transforming, run_by_document, without_autocast,
)
from .legendre_memory import (
    BLOCK, BlockOperators, Blocks, advanced, block_operators, by_steps, check_memory, impulse_response,
    legendre_memory_reference, read_out, read_out_matrices,
)


# ---- ops/implicit_attention/reference.py ----------------------------------------------------------------------------
# Implicit self-attention, token by token, in the order of the paper (equations 8 to 11).

def implicit_attention_reference(
    x, *, weight, bias, collapse, collapse_bias, activation, scale, theta, state, lengths, form, needs_state
):
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`; float32, or float64 for float64 inputs."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows, order = weight.shape[1:]
    m, final = legendre_memory_reference(
        x.to(dtype), weight=None, order=order, theta=theta, state=state, lengths=lengths
    )
    y = []
    for t in range(x.shape[1]):
        q, k, v = (
            activation(weight[i].to(dtype) @ m[:, t] + (0 if bias is None else bias[i].to(dtype).view(rows, 1)))
            for i in range(3)
        )  # (B, q', D) each
        mixed = (scale * q @ k.transpose(1, 2)).softmax(-1) @ v
        y.append(collapse.to(dtype) @ mixed + (0 if collapse_bias is None else collapse_bias.to(dtype)))
    return (torch.stack(y, 1) if y else x).to(x.dtype), final if needs_state else None


def self_check_inputs() -> dict:
    """Rows and channels that do not fill a tile or a vector."""
    shapes = {"x": (1, 75, 35), "weight": (3, 5, 6), "bias": (3, 5), "collapse": (5,), "collapse_bias": (1,)}
    options = {"theta": 20.0, "activation": F.gelu, "scale": 0.5, "form": "auto"}
    return draw(shapes) | options | {"state": None, "lengths": None, "needs_state": True}


# ---- ops/implicit_attention/torch_backend.py ------------------------------------------------------------------------
# Implicit self-attention in torch: all rows by one batched product, or groups of blocks computed again in the
# backward where they would take too much memory.

# Entries of queries, keys and values that a call holds for its backward (twice, so half a gigabyte in float32); a
# longer one computes them again in groups. Holding them takes a quarter off a training step.
HELD = 2**26
GROUP = 2**21


def implicit_attention_torch(
    x, *, weight, bias, collapse, collapse_bias, activation, scale, theta, state, lengths, form, needs_state
):
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows, order = weight.shape[1:]
    stacked = weight.to(dtype).flatten(0, 1)

    def attend(y: torch.Tensor) -> torch.Tensor:
        return _attend(y.unflatten(-2, (3, rows)), bias, collapse, collapse_bias, activation, scale)

    with without_autocast(x.device.type):
        if form == "recurrent" or x.shape[1] <= 2:
            y, final = by_steps(x.to(dtype), stacked, order, theta, state, lengths)
            return attend(y).to(x.dtype), final if needs_state else None
        blocks = None
        if form == "fft" and state is None:
            y = attend(_convolved(x.to(dtype), stacked, order, theta))
        else:
            blocks = Blocks(x.to(dtype), order, theta, state)
            y = _read_and_attend(blocks, stacked, x.dtype, attend)[:, : x.shape[1]]
        if not needs_state:
            return y.to(x.dtype), None
        blocks = Blocks(x.to(dtype), order, theta, None) if blocks is None else blocks
        return y.to(x.dtype), blocks.final_state(lengths)


def _read_and_attend(blocks, weight, dtype, attend):
    """(B, J C, D) from all blocks. The products are made in `dtype`: states are never rounded, what reads them is."""
    batch, _, block, channels = blocks.x.shape
    x, states = (part.flatten(0, 1).to(dtype) for part in (blocks.x, blocks.states))
    from_inputs, from_state = (matrix.to(dtype) for matrix in read_out_matrices(weight, blocks.operators))

    def group(from_inputs, from_state, x, states):
        y = read_out(from_inputs, from_state, x, states)
        return attend(y.unflatten(1, (block, -1)))  # (n, C, D)

    entries = block * weight.shape[0] * channels
    is_held = len(x) * entries <= HELD or torch.compiler.is_compiling() or is_transforming()
    run = partial(checkpoint, group, use_reentrant=False) if torch.is_grad_enabled() and not is_held else group
    size = max(1, (GROUP if x.is_cpu else HELD) // entries)
    pairs = zip(x.split(size), states.split(size))
    return torch.cat([run(from_inputs, from_state, *pair) for pair in pairs]).view(batch, -1, channels)


def _attend(y, bias, collapse, collapse_bias, activation, scale):
    """(..., 3, q', D) → (..., D): p (S V) = (p S) V, so that S V is never formed; softmax in float32 or wider."""
    if bias is not None:
        y = y + bias.to(y.dtype).unsqueeze(-1)
    q, k, v = activation(y).unbind(-3)
    wide = torch.promote_types(y.dtype, torch.float32)
    logits = q @ k.transpose(-1, -2)
    weights = (logits if scale == 1 else scale * logits).softmax(-1, dtype=wide)  # (..., q', q')
    m = (collapse.to(wide) @ weights).to(v.dtype).unsqueeze(-2) @ v
    m = m.squeeze(-2)
    return m if collapse_bias is None else m + collapse_bias.to(m.dtype)


def _convolved(x, weight, order, theta):
    """W m_t for all t by FFT, as in the paper's appendix A.1: (B, L, 3 q', D).

    Channels go through it in groups, and again in the backward, so that spectra stay small: all of them at once are
    3 q' times as large as two copies of x.
    """
    batch, length = x.shape[:2]
    kernel = weight @ impulse_response(order, theta, length).to(x.device, x.dtype)  # (r, L)
    spectrum = torch.fft.rfft(kernel, 2 * length)

    def group(x, spectrum):
        products = torch.fft.rfft(x.transpose(1, 2), 2 * length).unsqueeze(2) * spectrum  # (B, D', r, L + 1)
        return torch.fft.irfft(products, 2 * length)[..., :length]

    again = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_transforming()
    size = max(1, GROUP // max(1, batch * len(weight) * 2 * length))
    parts = (
        checkpoint(group, part, spectrum, use_reentrant=False) if again else group(part, spectrum)
        for part in x.split(size, 2)
    )
    return torch.cat(list(parts), 1).permute(0, 3, 2, 1)


# ---- ops/implicit_attention/decoding.py -----------------------------------------------------------------------------
# Decoding from a memory that lags behind the tokens: what a cache keeps of a layer, and one token from there.
#
# Advancing a memory by one token costs 2 q² operations a channel; to read the 3 q' rows of the j-th token after it out
# of it, W A^{j+1} times the memory, costs 6 q' q. So the C kernel advances it once in a block of C tokens and keeps the
# tokens since. Every other backend advances it with every token, and gets these states settled.

DECODE = "decode_token"  # what a backend is given that does
LAGGING = ("memory", "recent", "pending")


def is_exact_gelu(activation: Callable) -> bool:
    """Whether it is `F.gelu` without the approximation by tanh, as a function or one of the usual modules."""
    function = getattr(activation, "act", activation)  # transformers' GELUActivation holds it
    is_module = isinstance(function, torch.nn.GELU) and function.approximate == "none"
    return function is F.gelu or is_module


def decoder(x: torch.Tensor, activation: Callable) -> Callable | None:
    """What decodes tokens like x (B, L, D) from a lagging memory, if the backend that runs here does."""
    run = REGISTRY["implicit_attention"].select(x.device.type, x.dtype)
    return getattr(run, DECODE, None) if is_exact_gelu(activation) else None


def lagging(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """The states of a memory (B, q, D) that does not lag yet: recent (B, C, D) tokens since, pending (B,) how many."""
    recent = memory.new_zeros(memory.shape[0], BLOCK, memory.shape[2])
    pending = torch.zeros(memory.shape[0], dtype=torch.int64, device=memory.device)
    return {"memory": memory, "recent": recent, "pending": pending}


def settled(states: dict[str, torch.Tensor], theta: float) -> torch.Tensor | None:
    """The memory (B, q, D) after all tokens, or None without states."""
    memory, recent = states.get("memory"), states.get("recent")
    if memory is None or recent is None:
        return memory
    with without_autocast(memory.device.type):
        constants = block_operators(memory.shape[1], theta, BLOCK, memory.dtype, memory.device)
        return advanced(memory, recent, states["pending"], BlockOperators(*constants))


# ---- ops/implicit_attention/__init__.py -----------------------------------------------------------------------------
# Implicit self-attention: attention among the polynomial coefficients of one token's memory.

_OP = Op(
    "implicit_attention",
    builtin={"torch": implicit_attention_torch, "reference": implicit_attention_reference},
    kernels={"triton": "hf_hybrid_ssm_kernels.implicit_attention_triton"},
    self_check_inputs=self_check_inputs,
)
FORMS = ("auto", "chunked", "fft", "recurrent")


def implicit_attention(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    collapse: torch.Tensor,
    collapse_bias: torch.Tensor | None = None,
    *,
    theta: float,
    activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
    scale: float = 1.0,
    form: str = "auto",
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Q, K, V = act(L_i M_t + b_i), y_t = p softmax(scale · Q K^T) V + b, with the Legendre memory M_t (q, D) of x.

    Equations 8 to 11 of arXiv 2110.02402. All that follows the memory is local to a token.

    Args:
        x: (B, L, D).
        weight: (3, q', q), the reductions L_1, L_2, L_3 of the memory's order q.
        bias: (3, q') or None.
        collapse: p, (q',).
        collapse_bias: (1,) or None.
        theta: the memory's window, in tokens.
        activation: of queries, keys and values.
        scale: of the logits; 1 in the paper.
        form: "chunked" (blocks of matrix products), "fft" (the paper's; with an initial state, blocks instead)
            or "recurrent"; "auto" takes the faster of the first two, "fft" with the C kernel and "chunked" without.
            All compute the same, but "fft" to rounding: it does not multiply the future by exact zeros.
        initial_state, seq_idx, lengths, return_final_state, backend: as for `ops.legendre_memory.legendre_memory`.

    Returns:
        y (B, L, D) in x's dtype, and the memory (B, q, D), float32 or wider, or None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, or an unknown form.
    """
    check_tensor("x", x, (None, None, None), "B, L, D")
    check_tensor("weight", weight, (3, None, None), "3, q', q")
    rows, order = weight.shape[1:]
    check_tensor("bias", bias, (3, rows), "3, q'", optional=True)
    check_tensor("collapse", collapse, (rows,), "q'")
    check_tensor("collapse_bias", collapse_bias, (1,), "1", optional=True)
    check_memory(order, theta, initial_state, x)
    check_seq_idx(seq_idx, x.shape[0], x.shape[1])
    check_lengths(lengths, x.shape[0], x.shape[1])
    if form not in FORMS:
        raise ValueError(f"form={form!r} must be one of {', '.join(map(repr, FORMS))}.")
    run = partial(
        _OP.select(x.device.type, x.dtype, backend),
        weight=weight,
        bias=bias,
        collapse=collapse,
        collapse_bias=collapse_bias,
        theta=float(theta),
        activation=activation,
        scale=scale,
        form=form,
        needs_state=return_final_state,
    )
    return run_by_document(run, x, initial_state, seq_idx, lengths)
