# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 8bebdb9e744d82c1ff13a47cf959f5d226c04e0eb97a02a51bb0b855117ff935

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes


# ---- ops/_core/transforms.py ----------------------------------------------------------------------------------------
# What may be active around an op: autocast, and function transforms, for which kernels have no rules.

def is_transforming() -> bool:
    """Whether forward-mode differentiation or a `torch.func` transform (grad, jvp, vmap, ...) is active.

    Compiled kernels and autograd functions with a backward of their own have no rules for them; if this is True, ops
    use plain torch operations, which do. `torch.compile` guards on the answer.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether `torch.vmap` runs over `tensor`, so that it stands for many values."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """`scaled_dot_product_attention`, by its equation inside a transform: the fused kernels have no tangents."""
    if not is_transforming():
        return F.scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """No autocast on a device of this type; "meta" has none to disable."""
    if device_type == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type)):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


# ---- ops/_core/blocks.py --------------------------------------------------------------------------------------------
# Sequences cut into blocks of w tokens: a convolution within a block as a matrix, and the documents of its tokens.

def power_of_two(least: int, start: int = 1) -> int:
    """The smallest power of two, from `start` on, that is not below `least`. By comparisons, so that `torch.compile`
    gets a number, valid for a range of lengths, and no expression of the length that all later shapes would carry on.
    """
    while start < least:
        start *= 2
    return start


def toeplitz(taps: torch.Tensor) -> torch.Tensor:
    """T (..., h, h), T[i, j] = taps[h - 1 + j - i] from input i to output j, of taps (..., 2h - 1)."""
    size = (taps.shape[-1] + 1) // 2
    return taps.unfold(-1, size, 1).flip(-2)


def causal_toeplitz(kernel: torch.Tensor) -> torch.Tensor:
    """T (..., w, w) with T[i, j] = K_{j-i} for i <= j and 0 above, from a kernel (..., w)."""
    return toeplitz(F.pad(kernel, (kernel.shape[-1] - 1, 0)))


def document_blocks(seq_idx: torch.Tensor | None, block: int) -> torch.Tensor | None:
    """(B, n, w): the document of each token of each block; the last one goes on to the end of the last block."""
    if seq_idx is None:
        return None
    batch, length = seq_idx.shape
    count = -(-length // block)
    padding = seq_idx[:, -1:].expand(batch, count * block - length)
    return torch.cat([seq_idx, padding], dim=1).view(batch, count, block)


def document_before_block(documents: torch.Tensor) -> torch.Tensor:
    """(B, n, 1): that of the token before each block; the initial state belongs to the row's first document."""
    return torch.cat([documents[:, :1, :1], documents[:, :-1, -1:]], dim=1)


# ---- ops/_core/self_check.py ----------------------------------------------------------------------------------------
# Does a kernel compute, on this very device, what its reference computes?
#
# Kernels that are right on one card, driver or compiler have been wrong on another. So each optional backend is run once
# per device type and dtype on a small example before it is used, forward and backward, against the float64 reference.

# relative to the largest entry; a few times what rounding alone does to the examples
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def draw(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Normally distributed float32 tensors of these shapes, the same ones each time: an op's `self_check_inputs`."""
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def largest_error(
    kernel: Callable,
    reference: Callable,
    inputs: Callable[[], dict],
    device_type: str,
    dtype: torch.dtype,
    *,
    gradients: bool = True,
) -> float:
    """The largest relative error of `kernel` in outputs and gradients; NaN counts as infinite.

    `inputs()` gives keyword arguments of the op: float32 CPU tensors, which are differentiated if `gradients`, tensors
    of whole numbers, and options.
    """
    # the first use may lie inside a trace, no_grad, autocast, a default device, or a checkpoint (which counts tensors)
    surroundings = (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_identity, _identity),
        torch.autocast(device_type, enabled=False),
        torch.device("cpu"),
    )
    with ExitStack() as stack:
        for context in surroundings:
            stack.enter_context(context)
        arguments = inputs()
        run = _outputs_and_gradients if gradients else _outputs
        got = run(kernel, arguments, torch.device(device_type), dtype)
        rounded = {name: t.to(dtype) if _is_real(t) else t for name, t in arguments.items()}
        want = run(reference, rounded, torch.device("cpu"), torch.float64)
        return max(_relative(g, w) for g, w in zip(got, want))


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_real(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _outputs(op: Callable, arguments: dict, device: torch.device, dtype: torch.dtype) -> list:
    """Of an op that may overwrite its arguments."""
    tensors = {name: t.to(device, copy=True) for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    tensors = {name: t.to(dtype) if _is_real(t) else t for name, t in tensors.items()}
    with torch.no_grad():
        return [t.cpu().double() for t in op(**(arguments | tensors))]


def _outputs_and_gradients(op: Callable, arguments: dict, device: torch.device, dtype: torch.dtype) -> list:
    tensors = {
        name: t.detach().to(device, dtype).requires_grad_()
        for name, t in arguments.items()
        if isinstance(t, torch.Tensor)
    }
    outputs = op(**(arguments | tensors))
    weights = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=weights).to(o.device, o.dtype)).sum() for o in outputs)
    return [t.detach().cpu().double() for t in (*outputs, *torch.autograd.grad(loss, list(tensors.values())))]


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or not got.isfinite().all():
        return float("inf")
    return float((got - want).abs().max() / want.abs().max())


# ---- ops/_core/checks.py --------------------------------------------------------------------------------------------
# Checks at the entry of every op: one sentence that names the argument, what was given and what was expected.

def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the host can read values without waiting for a device."""
    return tensor.device.type == "cpu"


def can_read_values(tensor: torch.Tensor) -> bool:
    """Whether reading values is possible and cheap: on CPU, outside of tracing and vmap, and not on meta.

    Every look at values asks here first: elsewhere it would be a wait for the device, in each layer or token.
    """
    return (
        is_on_host(tensor)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not isinstance(tensor, FakeTensor)
        and not is_batched(tensor)
    )


def check_tensor(
    name: str,
    value: torch.Tensor | None,
    shape: tuple[int | None, ...],
    letters: str,
    *,
    like: torch.Tensor | None = None,
    optional: bool = False,
) -> None:
    """Check rank, sizes (None accepts any), and optionally that dtype and device equal those of `like`.

    Raises:
        TypeError: not a tensor, or another dtype than `like`.
        ValueError: wrong shape or another device than `like`.
    """
    if value is None and optional:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of shape ({letters}), got {type(value).__name__}.")
    if not _fits(value.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape ({letters}) = ({wanted}), got {tuple(value.shape)}.")
    if like is not None and value.dtype != like.dtype:
        raise TypeError(f"{name} must have dtype {like.dtype} like the other inputs, got {value.dtype}.")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the other inputs, got {value.device}.")


def _fits(have: torch.Size, shape: tuple[int | None, ...]) -> bool:
    if len(have) != len(shape):
        return False
    for size, wanted in zip(have, shape):  # noqa: SIM110 - a generator costs more than what it compares
        if wanted is not None and size != wanted:
            return False
    return True


def check_seq_idx(seq_idx: torch.Tensor | None, batch: int, length: int) -> None:
    """`seq_idx` (B, L) integer: the document each token of a packed row belongs to, never decreasing along a row.

    The order is checked only where the values can be read.
    """
    if seq_idx is None:
        return
    check_tensor("seq_idx", seq_idx, (batch, length), "B, L")
    if seq_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"seq_idx must be int32 or int64, got {seq_idx.dtype}.")
    if length > 1 and can_read_values(seq_idx) and bool((seq_idx[:, 1:] < seq_idx[:, :-1]).any()):
        raise ValueError("seq_idx must not decrease along a row: each document of a packed row is one contiguous run.")


def check_lengths(lengths: torch.Tensor | None, batch: int, length: int) -> None:
    """`lengths` (B,) integer in 0..L. The range is checked only where the values can be read.

    Raises:
        TypeError: not an integer tensor.
        ValueError: wrong shape or a value out of range.
    """
    if lengths is None:
        return
    check_tensor("lengths", lengths, (batch,), "B")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}.")
    if can_read_values(lengths) and bool(((lengths < 0) | (lengths > length)).any()):
        raise ValueError(f"lengths must lie in 0..{length}, the length of the row, got {lengths.tolist()}.")


def check_output_positions(stride: int | None, positions: torch.Tensor | None, batch: int, length: int) -> None:
    """The two ways to ask for some outputs only: every `stride`-th token, or those at `positions` (B, J) of each row.

    Raises:
        TypeError: `positions` is not an int64 tensor.
        ValueError: both are given, `stride` < 1, or `positions` has the wrong shape or values outside of 0..L-1.
    """
    if stride is not None and stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}.")
    if positions is None:
        return
    if stride is not None:
        raise ValueError(f"stride={stride} and positions are two ways to say which outputs are wanted: give one.")
    check_tensor("positions", positions, (batch, None), "B, J")
    if positions.dtype != torch.int64:
        raise TypeError(f"positions must be int64, got {positions.dtype}.")
    if can_read_values(positions) and bool(((positions < 0) | (positions >= length)).any()):
        raise ValueError(f"positions must lie in 0..{length - 1}, got {int(positions.min())}..{int(positions.max())}.")


# ---- ops/_core/rows.py ----------------------------------------------------------------------------------------------
# The rows of a batch: real tokens at the front of each (`lengths`), and the documents packed into it (`seq_idx`).
#
# Where a recurrence cannot reset midway, packed rows are taken apart: every document becomes a row of its own.

def zero_beyond(x: torch.Tensor, lengths: torch.Tensor | None, dim: int = 1) -> torch.Tensor:
    """x (B, ..., L, ...), 0 along `dim` after each row's length: a NaN there must not spread."""
    if lengths is None:
        return x
    batch, length = x.shape[0], x.shape[dim]
    real = torch.arange(length, device=x.device) < lengths.unsqueeze(1)
    return torch.where(real.view(batch, *[1] * (dim - 1), length, *[1] * (x.dim() - dim - 1)), x, 0.0)


def extend_last_document(seq_idx: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """seq_idx (B, L) with each row's padding assigned to its last real document, so that no state resets there."""
    last = seq_idx.gather(1, (lengths.long() - 1).clamp(min=0).unsqueeze(1))
    real = torch.arange(seq_idx.shape[1], device=seq_idx.device) < lengths.unsqueeze(1)
    return torch.where(real, seq_idx, last)


def take_outputs(x: torch.Tensor, stride: int | None, positions: torch.Tensor | None) -> torch.Tensor:
    """The wanted tokens of x (B, L, D): all, every `stride`-th, or those at `positions` (B, J)."""
    if positions is not None:
        return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return x if stride is None else x[:, stride - 1 :: stride]


def last_inputs(
    x: torch.Tensor,
    width: int,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """The last K - 1 inputs of each row's last document, zero where that document is shorter; (B, K - 1, D).

    Args:
        x: (B, L, D).
        width: K, the taps.
        initial_state: (B, K - 1, D), the inputs before the row's first token, of its first document.
        seq_idx: (B, L) int.
        lengths: (B,) int.
    """
    batch, length, channels = x.shape
    if lengths is None and seq_idx is None and length >= width - 1:
        return x[:, length - width + 1 :].clone()
    if length == 0:
        return x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state.to(x.dtype)
    ends = torch.full((batch,), length, device=x.device) if lengths is None else lengths.long()
    columns = ends.unsqueeze(1) + torch.arange(1 - width, 0, device=x.device)  # negative ones lie in the state
    inside, index = columns >= 0, columns.clamp(min=0)
    state = x.gather(1, index.unsqueeze(-1).expand(-1, -1, channels))
    before: torch.Tensor | float = 0.0
    if initial_state is not None:
        early = (columns + width - 1).clamp(max=width - 2).unsqueeze(-1)
        before = initial_state.to(x.dtype).gather(1, early.expand(-1, -1, channels))
    state = torch.where(inside.unsqueeze(-1), state, before)
    if seq_idx is None:
        return state
    last = seq_idx.gather(1, (ends - 1).clamp(min=0).unsqueeze(1))
    return torch.where((seq_idx.gather(1, index) == last).unsqueeze(-1), state, 0.0)


@dataclass(frozen=True)
class PackedSequences:
    """The documents of a packed batch, N in all.

    Args:
        gather_index: (N, T) int64, `gather_index[n, t]` is the flat index b · L + l of a document's token (after its
            end any valid one).
        lengths: (N,) int64, tokens of each document.
        first: (B,) int64, each row's first document.
        last: (B,) int64, the document that holds the row's last real token.
        scatter_index: (B, L) int64, the flat index n · T + t of each token of the batch.
    """

    gather_index: torch.Tensor
    lengths: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    scatter_index: torch.Tensor

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) → (N, T, ...), zero after the end of each document."""
        rows = x.flatten(0, 1).index_select(0, self.gather_index.flatten())
        return zero_beyond(rows.unflatten(0, self.gather_index.shape), self.lengths)

    def pack(self, y: torch.Tensor) -> torch.Tensor:
        """(N, T, ...) → (B, L, ...)."""
        return y.flatten(0, 1).index_select(0, self.scatter_index.flatten()).unflatten(0, self.scatter_index.shape)

    def unpack_state(self, state: torch.Tensor | None) -> torch.Tensor | None:
        """(B, ...) → (N, ...): a row's state belongs to its first document, the others start from zero."""
        if state is None:
            return None
        return state.new_zeros(len(self.lengths), *state.shape[1:]).index_copy(0, self.first, state)


def packed_sequences(seq_idx: torch.Tensor, lengths: torch.Tensor | None) -> PackedSequences:
    """The documents of `seq_idx` (B, L); with `lengths` (B,), only each row's first tokens are real.

    Raises:
        ValueError: under vmap over `seq_idx`, where the number of documents is not one number.
    """
    if is_batched(seq_idx):
        raise ValueError("seq_idx must not be mapped over by vmap: the number of documents depends on its values.")
    batch, length = seq_idx.shape
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    document = starts.flatten().cumsum(0) - 1  # (B L,)
    flat = torch.arange(batch * length, device=seq_idx.device)
    begin = flat[starts.flatten()]
    column = flat - begin[document]
    real = torch.ones_like(starts)
    if lengths is not None:
        real = torch.arange(length, device=seq_idx.device) < lengths.unsqueeze(1)
    count = torch.zeros_like(begin).index_add_(0, document, real.flatten().to(begin.dtype))
    longest = int(column.max()) + 1
    gather_index = (begin.unsqueeze(1) + torch.arange(longest, device=seq_idx.device)).clamp(max=batch * length - 1)
    first = document.view(batch, length)[:, 0]
    end = torch.full_like(first, length) if lengths is None else lengths.to(first.dtype)
    last = document.view(batch, length).gather(1, (end - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return PackedSequences(gather_index, count, first, last, (document * longest + column).view(batch, length))


def run_by_document(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    x: torch.Tensor,
    state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`run(x, state=..., lengths=...)` on the documents of packed rows x (B, L, ...), each from its own start.

    Returns:
        Outputs (B, L, ...), and for each row the state after its last real token (None if `run` returns none).
    """
    if seq_idx is None or seq_idx.numel() == 0:
        return run(zero_beyond(x, lengths), state=state, lengths=lengths)
    documents = packed_sequences(seq_idx, lengths)
    y, final = run(documents.unpack(x), state=documents.unpack_state(state), lengths=documents.lengths)
    return documents.pack(y), None if final is None else final[documents.last]


# ---- ops/_core/dispatch.py ------------------------------------------------------------------------------------------
# Which implementation of an op runs, and why.
#
# An op is a folder of implementations with one meaning: `reference` (the equation, step by step), `torch` (vectorised,
# runs everywhere), and, where they pay off, `native` (CPU) and `triton` (CUDA). The first of `PREFERENCE` that can run
# is taken. `HF_HYBRID_SSM_BACKEND=torch` or `with backend("torch"):` forces one for every op, `backend="torch"` for one
# call; a forced implementation that cannot run raises and says why, it is never replaced silently.

logger = logging.getLogger(__name__)

BACKENDS = ("triton", "native", "torch", "reference")
PREFERENCE = ("triton", "native", "torch")
KERNEL_OF = {"cuda": "triton", "cpu": "native"}
ENVIRONMENT_VARIABLE = "HF_HYBRID_SSM_BACKEND"
_KEY = "hf_hybrid_ssm_backend"


@dataclass
class Op:
    """One op and its implementations.

    Args:
        name: the public name, used in messages.
        builtin: implementations that are plain torch and always importable, by backend name.
        kernels: modules that need an optional package, by backend name. Each has a function named after op and
            backend (`causal_conv_native`) of the same signature and a function
            `supports(device_type, dtype) -> str | None`: None if it can run, else the reason it cannot. They are
            imported on first use, so that a missing or broken package never breaks the import.
        self_check_inputs: arguments on which a kernel is checked against the reference before its first use.
        opaque: names in `builtin` that are more than plain torch operations, and so, like every kernel, cannot run
            inside a function transform.
        differentiable: False for an op of decoding, which overwrites its state and has no gradients to be checked.

    Raises:
        ValueError: there are kernels, but no inputs on which to check them.
    """

    name: str
    builtin: dict[str, Callable]
    kernels: dict[str, str] = field(default_factory=dict)
    self_check_inputs: Callable[[], dict] | None = None
    opaque: tuple[str, ...] = ()
    differentiable: bool = True
    _loaded: dict[str, Callable | str] = field(default_factory=dict, repr=False)
    _supports: dict[str, Callable] = field(default_factory=dict, repr=False)
    _errors: dict[tuple, float | str] = field(default_factory=dict, repr=False)
    _preferred: dict[tuple, str] = field(default_factory=dict, repr=False)
    _warned: set = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if self.kernels and self.self_check_inputs is None:
            raise ValueError(f"{self.name} has kernels ({', '.join(self.kernels)}) but no self_check_inputs.")
        REGISTRY[self.name] = self

    def unavailable(self, name: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Why backend `name` cannot run this op on such tensors; None if it can."""
        if is_transforming() and (name in self.opaque or name in self.kernels):
            return "it has no rules for forward-mode differentiation and the transforms of torch.func"
        if name in self.builtin:
            return None
        if name not in self.kernels:
            return f"{self.name} has no {name} implementation"
        if name not in self._loaded:
            self._load(name)
        loaded = self._loaded[name]
        if isinstance(loaded, str):
            return loaded
        return self._supports[name](device_type, dtype) or self._failed_check(name, device_type, dtype)

    def self_check(self, name: str, device_type: str, dtype: torch.dtype) -> float | str:
        """The largest relative error of an optional backend that can run here, or what it raised; computed once."""
        key = (name, device_type, dtype)
        if key not in self._errors:
            kernel, reference, inputs = self._loaded[name], self.builtin["reference"], self.self_check_inputs
            self._errors[key] = 0.0  # the check itself must not ask for a check
            try:
                options = {"gradients": self.differentiable}
                self._errors[key] = largest_error(kernel, reference, inputs, device_type, dtype, **options)  # type: ignore[arg-type]
            except Exception as error:  # whatever a kernel does, the torch backend must work
                self._errors[key] = f"{type(error).__name__}: {error}"
            if reason := self._failed_check(name, device_type, dtype):
                logger.warning("%s: the %s backend will not be used: %s.", self.name, name, reason)
        return self._errors[key]

    def _failed_check(self, name: str, device_type: str, dtype: torch.dtype) -> str | None:
        error, where = self.self_check(name, device_type, dtype), f"its self-check on {device_type} in {dtype}"
        if isinstance(error, str):
            return f"{where} raised {error}"
        return (
            None if error <= BOUNDS[dtype] else f"{where} is off by {error:.1e} (at most {BOUNDS[dtype]:.0e} allowed)"
        )

    def _warn_once(self, device_type: str, dtype: torch.dtype) -> None:
        """A missing kernel is not an error, but nobody should have to find out with a stopwatch."""
        kernel = KERNEL_OF.get(device_type)
        if kernel not in self.kernels or dtype not in BOUNDS or kernel in self._warned:
            return
        self._warned.add(kernel)
        if reason := self.unavailable(kernel, device_type, dtype):
            message = "%s runs its torch implementation on %s, slower than the %s kernel: %s."
            logger.warning(message, self.name, device_type, kernel, reason)

    def select(self, device_type: str, dtype: torch.dtype, requested: str | None = None) -> Callable:
        """The implementation to run on tensors of this device type and dtype."""
        requested, transforming = requested or forced_backend(), is_transforming()
        if requested is None and not transforming and not torch.compiler.is_compiling():
            key = (device_type, dtype)  # asked once: decoding a token asks for every op of every layer
            if key not in self._preferred:
                self._preferred[key] = _choose(self.name, device_type, dtype, None)
            name = self._preferred[key]
        else:
            name = _choose(self.name, device_type, dtype, requested)
        return self.builtin[name] if name in self.builtin else self._loaded[name]  # type: ignore[return-value]

    def explain(self, device_type: str, dtype: torch.dtype) -> dict[str, str]:
        """For each backend "runs", or the reason it cannot run on such tensors."""
        return {name: self.unavailable(name, device_type, dtype) or "runs" for name in BACKENDS}

    def _load(self, name: str) -> None:
        try:
            module = importlib.import_module(self.kernels[name])
            self._supports[name], self._loaded[name] = module.supports, getattr(module, f"{self.name}_{name}")
        except Exception as error:  # a broken optional kernel must not take the torch path down with it
            self._loaded[name] = f"{type(error).__name__} while importing it: {error}"


REGISTRY: dict[str, Op] = {}


@torch.compiler.assume_constant_result
def _choose(op: str, device_type: str, dtype: torch.dtype, requested: str | None) -> str:
    """The name of the backend to run; `torch.compile` calls this once while it traces."""
    name = validate_backend(requested, "backend")
    if name is None:
        order = (*PREFERENCE, "reference")
        name = next(name for name in order if REGISTRY[op].unavailable(name, device_type, dtype) is None)
        if name == "torch" and not is_transforming():
            REGISTRY[op]._warn_once(device_type, dtype)
        return name
    if reason := REGISTRY[op].unavailable(name, device_type, dtype):
        raise ValueError(f"backend={name!r} was forced but cannot run {op}: {reason}.")
    return name


def validate_backend(name: str | None, source: str) -> str | None:
    """`name`, if it is None or one of `BACKENDS`.

    Raises:
        ValueError: it is neither.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{source}={name!r} is not a backend; choose one of {', '.join(BACKENDS)}.")
    return name


_EVERYWHERE = validate_backend(os.environ.get(ENVIRONMENT_VARIABLE) or None, ENVIRONMENT_VARIABLE)
_forced: ContextVar[str | None] = ContextVar(_KEY)


class _Traced(threading.local):
    """The same for `torch.compile`, which cannot trace a context variable, but guards on what is local to a thread."""

    name = _EVERYWHERE


_traced = _Traced()


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Force every op inside the `with` block to the backend `name` (one of `BACKENDS`; None lifts the force).

    It holds in this thread (and task of asyncio) and in the backward passes started there, and nowhere else; the
    environment variable HF_HYBRID_SSM_BACKEND holds everywhere.
    """
    validate_backend(name, "backend")
    if torch.compiler.is_compiling():
        previous, _traced.name = _traced.name, name
        try:
            yield
        finally:
            _traced.name = previous
        return
    token = _forced.set(name)
    _publish(name)
    try:
        yield
    finally:
        _forced.reset(token)
        _publish(_forced.get(_EVERYWHERE))


def _publish(name: str | None) -> None:
    """Tell what cannot read the context variable: traces, and autograd's own threads, which get torch's thread-local
    objects from the thread that called backward (a checkpoint there runs the forward again)."""
    _traced.name = name
    torch._C._stash_obj_in_tls(_KEY, name)


def forced_backend() -> str | None:
    """The name of the backend forced here, or None."""
    if torch.compiler.is_compiling():
        return _traced.name
    if torch._C._current_graph_task_id() != -1 and torch._C._is_key_in_tls(_KEY):
        return _forced.get(torch._C._get_obj_in_tls(_KEY))
    return _forced.get(_EVERYWHERE)
