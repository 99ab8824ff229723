"""The Longhorn scan on CUDA: launches of the Triton kernels, registered as torch.library ops with autograd."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.triton_helpers import (
    contiguous,
    dense_rows,
    device_guard,
    first_that_fits,
    multiprocessors,
    strides,
    supports,
)
from hf_hybrid_ssm.ops.longhorn_scan import triton_backward_kernels as backward_kernels
from hf_hybrid_ssm.ops.longhorn_scan import triton_chunk_kernels as chunk_kernels
from hf_hybrid_ssm.ops.longhorn_scan import triton_chunk_summary_kernels as chunk_summary_kernels
from hf_hybrid_ssm.ops.longhorn_scan import triton_kernels as kernels
from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes
from hf_hybrid_ssm.ops.longhorn_scan.heads import over_heads
from hf_hybrid_ssm.ops.longhorn_scan.reference import ScanInputs, needs_gradient

__all__ = ["longhorn_scan_triton", "supports"]

CHAIN_BLOCK = 512
SHARED_TOKENS = 32  # of a program that prepares what all channels share
SUMMED_TOKENS = (32, 16, 8)  # of one that adds it up, which keeps several parts in shared memory


@over_heads
def longhorn_scan_triton(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """As `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`; always returns the final state."""
    if inputs.lengths is not None:  # a token with k = 0 leaves the state as it is
        x, beta_logit, k, q = (zero_beyond(t, inputs.lengths) for t in inputs[:4])
        z = None if inputs.z is None else zero_beyond(inputs.z, inputs.lengths)
        inputs = ScanInputs(x, beta_logit, k, q, z, *inputs[5:9])
    o, final_state, _ = scan(*inputs._replace(keeps=needs_gradient(inputs)))
    return o, final_state


class _Launch:
    """What the launches of one direction share: sizes, grids, and the tensors that all channels read."""

    def __init__(self, inputs: ScanInputs, sizes: tuple[dict, dict | None], *, backward: bool):
        x = inputs.x
        (self.batch, self.length, self.channels), self.num_states = x.shape, inputs.k.shape[-1]
        self.sizes, self.chunks = sizes
        self.block = self.sizes["BLOCK"]
        self.blocks = triton.cdiv(self.length, self.block)
        self.tiles = triton.cdiv(self.channels, self.sizes["BD"])
        lanes = self.batch * self.tiles * 32 * ((backward and self.chunks) or self.sizes)["num_warps"]
        self.splits = triton_sizes.time_splits(lanes, self.length, multiprocessors(x.device), backward)
        self.grid = (self.tiles * self.splits * self.batch,)
        self.exact: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
        self._prepare(inputs.k, inputs.q, inputs.seq_idx)

    def _prepare(self, k: Tensor, q: Tensor, seq_idx: Tensor | None) -> None:
        self.padded = self.blocks * self.block
        self.width = self.sizes["S"] * self.sizes["P"]
        keys, queries = (torch.empty(self.batch, self.padded, self.width, **self.exact) for _ in range(2))
        norms = torch.empty(self.batch, self.padded, **self.exact)
        keeps = None if seq_idx is None else torch.empty_like(norms)
        self.shared = keys, queries, norms, keeps
        kernels.prepare_kernel[self.shared_grid](
            k, q, seq_idx, keys, queries, norms, keeps,
            *strides(k, q), self.length, self.padded, self.num_states, self.shared_grid[0] // self.batch,
            HAS_DOCUMENTS=seq_idx is not None, T=SHARED_TOKENS, BN=self.width, num_warps=4,
        )  # fmt: skip

    @property
    def shared_grid(self) -> tuple[int]:
        return (triton.cdiv(self.padded, SHARED_TOKENS) * self.batch,)

    def shape(self, tiles: int | None = None) -> tuple[int, ...]:
        """The numbers that every kernel takes, of the launch's tiles of channels or of others."""
        counts = (tiles or self.tiles, self.splits, self.blocks, triton.cdiv(self.blocks, self.splits))
        return (self.length, self.channels, self.num_states, *counts, 1)

    def between_splits(
        self,
        kernel: Any,
        chunk_kernel: Any,
        given: tuple,
        flags: dict[str, bool],
        state: Tensor | None,
        *,
        reverse: bool,
    ) -> Tensor:
        """The state that enters each split, (B, splits, D, N): a first pass, token by token or in chunks, and a chain.

        Args:
            given: what the first pass reads: tensors, the strides of some of them.
        """
        tensors, steps = given
        products, ends = (
            torch.empty(self.batch, self.splits, self.channels, self.num_states, **self.exact) for _ in range(2)
        )
        if self.chunks is None:
            kernel[self.grid](*tensors, products, ends, *steps, *self.shape(), **flags, **self.sizes)
        else:
            tiles = triton.cdiv(self.channels, self.chunks["BD"])
            grid = (tiles * self.splits * self.batch,)
            held = torch.empty(*grid, chunk_summary_kernels.held_rows(self.block), self.chunks["BD"], **self.exact)
            chunk_kernel[grid](*tensors, products, ends, held, *steps, *self.shape(tiles), **flags, **self.chunks)
        return self._chain(products, ends, state, reverse=reverse)

    def _chain(self, products: Tensor, ends: Tensor, state: Tensor | None, *, reverse: bool) -> Tensor:
        size, entering = self.channels * self.num_states, torch.empty_like(products)
        tiles = triton.cdiv(size, CHAIN_BLOCK)
        kernels.chain_kernel[(tiles * self.batch,)](
            products, ends, state, entering, size, self.splits, tiles,
            HAS_STATE=state is not None, REVERSE=reverse, BLOCK=CHAIN_BLOCK,
        )  # fmt: skip
        return entering


def _attempts(x: Tensor, num_states: int, *, backward: bool) -> list[tuple[dict, dict | None]]:
    """Sizes to launch with, until one fits."""
    sizes = triton_sizes.tile_sizes(
        num_states,
        backward=backward,
        rows=x.shape[0] * x.shape[2],
        length=x.shape[1],
        dtype=str(x.dtype),
        device=_device_name(x),
    )
    chunks = triton_sizes.chunk_sizes(num_states, str(x.dtype), _device_name(x))
    return triton_sizes.by_shared_memory(sizes, chunks, backward=backward)


def _device_name(x: Tensor) -> str:
    """Nothing where there is no card, as while a model is traced for one."""
    return torch.cuda.get_device_name(x.device) if x.is_cuda and torch.cuda.is_available() else ""


def _empty(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    x, num_states, width = inputs.x, inputs.k.shape[-1], triton_sizes.WIDTH
    batch, length, channels = x.shape
    block = triton_sizes.block_tokens(num_states, str(x.dtype), _device_name(x))
    kept = (batch, (length + block - 1) // block, (channels + width - 1) // width, num_states, width)
    exact: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    o, final_state = x.new_empty(x.shape), torch.empty(batch, channels, num_states, **exact)
    return o, final_state, torch.empty(kept if inputs.keeps else (0,), **exact)


def _dense(inputs: ScanInputs) -> ScanInputs:
    """As the kernels read them."""
    beta_bias, D, seq_idx = contiguous(inputs.beta_bias, inputs.D, inputs.seq_idx)
    x, beta_logit, k, q, z = dense_rows(*inputs[:5])
    return ScanInputs(x, beta_logit, k, q, z, beta_bias, D, inputs.state, seq_idx, keeps=inputs.keeps)


def _forward(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """→ output (B, L, D), final state (B, D, N), and checkpoints (B, L / BLOCK, D / WIDTH, N, WIDTH) if it `keeps`."""
    inputs = _dense(inputs)
    x, beta_logit, k, _, z, beta_bias, D, initial_state, seq_idx, *_ = inputs
    num_states = k.shape[-1]
    o, final_state, checkpoints = _empty(inputs)
    if final_state.numel() == 0 or x.shape[1] == 0:
        final_state = torch.zeros_like(final_state) if initial_state is None else initial_state.float().clone()
        return o, final_state, checkpoints
    states = None if initial_state is None else initial_state.float().contiguous()
    flags = {"HAS_BIAS": beta_bias is not None, "HAS_DOCUMENTS": seq_idx is not None}

    def run(sizes: tuple[dict, dict | None]) -> None:
        launch, entering = _Launch(inputs, sizes, backward=False), states
        keys, queries, norms, keeps = launch.shared
        if launch.splits > 1:
            read = (x, beta_logit, keys, norms, keeps, beta_bias), strides(x, beta_logit)
            passes = kernels.forward_summary_kernel, chunk_summary_kernels.forward_chunk_summary_kernel
            entering = launch.between_splits(*passes, read, flags, entering, reverse=False)
        kernels.forward_kernel[launch.grid](
            x, beta_logit, z, keys, queries, norms, keeps, beta_bias, D, entering, o, final_state, checkpoints,
            *strides(x, beta_logit, z), *launch.shape(), **flags, **launch.sizes,
            HAS_SKIP=D is not None, HAS_GATE=z is not None, HAS_STATES=entering is not None, SAVE=inputs.keeps,
            WIDTH=triton_sizes.WIDTH,
        )  # fmt: skip

    with device_guard(x):
        compiled = ("forward", num_states, x.dtype, inputs.keeps, D is None, z is None, *flags.values(), x.device)
        first_that_fits(compiled, _attempts(x, num_states, backward=False), run)
    return o, final_state, checkpoints


def _backward(
    inputs: ScanInputs, gradients: Sequence[Tensor | None], needed: Sequence[bool], checkpoints: Tensor
) -> list[Tensor | None]:
    """→ gradients of x, beta_logit, k, q, z, beta_bias, D and the initial state."""
    inputs = _dense(inputs)
    x, beta_logit, k, q, z, beta_bias, D, state, seq_idx, *_ = inputs
    (batch, length, channels), num_states = x.shape, k.shape[-1]
    given, grad_final_state, _ = gradients
    (grad_o,) = dense_rows(torch.zeros_like(x) if given is None else given)
    dx, dlogit, dk, dq, dz = (
        torch.empty(t.shape if t is not None else (0,), dtype=x.dtype, device=x.device)
        for t in (x, beta_logit, k, q, z)
    )
    exact: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    dinitial = torch.empty(batch, channels, num_states, **exact)
    if dinitial.numel() == 0 or length == 0:
        dinitial = torch.zeros_like(dinitial) if grad_final_state is None else grad_final_state.float().clone()
        sums = [None if t is None else torch.zeros_like(t) for t in (beta_bias, D)]
        return [dx, dlogit, dk.zero_(), dq.zero_(), dz, *sums, dinitial if state is None else dinitial.to(state.dtype)]
    grads = None if grad_final_state is None else grad_final_state.float().contiguous()
    flags = {"HAS_BIAS": beta_bias is not None, "HAS_DOCUMENTS": seq_idx is not None, "HAS_GATE": z is not None}

    def run(sizes: tuple[dict, dict | None]) -> list[Tensor]:
        launch, leaving = _Launch(inputs, sizes, backward=True), grads
        keys, queries, norms, keeps = launch.shared
        if launch.splits > 1:
            read = (beta_logit, z, grad_o, keys, queries, norms, keeps, beta_bias), strides(beta_logit, z, grad_o)
            passes = backward_kernels.backward_summary_kernel, chunk_summary_kernels.backward_chunk_summary_kernel
            leaving = launch.between_splits(*passes, read, flags, leaving, reverse=True)
        common, tiles, tokens = launch.sizes, launch.tiles, (batch, launch.padded)
        dq_parts, dk_parts = (torch.empty(tiles, *tokens, launch.width, **exact) for _ in range(2))
        norm_parts = torch.empty(tiles, *tokens, **exact)
        dbias, dskip = (
            torch.empty((batch * launch.splits, channels) if t is not None else (0,), **exact) for t in (beta_bias, D)
        )
        chunks = launch.chunks
        kernel = backward_kernels.backward_kernel if chunks is None else chunk_kernels.chunk_backward_kernel
        if chunks is None:
            held = launch.block // common["T"] * launch.width
        else:
            held = chunk_kernels.held_rows(launch.block, launch.width)
        scratch = torch.empty(*launch.grid, held, common["BD"], **exact)
        kernel[launch.grid](
            x, beta_logit, z, grad_o, keys, queries, norms, keeps, beta_bias, D, checkpoints, leaving, scratch,
            dx, dlogit, dz, dq_parts, dk_parts, norm_parts, dbias, dskip, dinitial,
            *strides(x, beta_logit, z, grad_o), *launch.shape(), batch,
            **flags, **(common if chunks is None else chunks),
            HAS_SKIP=D is not None, HAS_GRAD_STATES=leaving is not None, WIDTH=triton_sizes.WIDTH,
        )  # fmt: skip

        def add_up(summed: int) -> None:
            programs = triton.cdiv(launch.padded, summed)
            backward_kernels.finish_kernel[(programs * batch,)](
                dq_parts, dk_parts, norm_parts, keys, dq, dk, length, launch.padded, num_states,
                programs, tiles, batch, T=summed, BN=launch.width, num_warps=4,
            )  # fmt: skip

        first_that_fits(("finish", launch.width, x.dtype, x.device), SUMMED_TOKENS, add_up)
        return [dbias, dskip]

    with device_guard(x):
        compiled = ("backward", num_states, x.dtype, D is None, grads is None, *flags.values(), x.device)
        dbias, dskip = first_that_fits(compiled, _attempts(x, num_states, backward=True), run)
    sums = [None if like is None else t.sum(0).to(like.dtype) for t, like in ((dbias, beta_bias), (dskip, D))]
    return [dx, dlogit, dk, dq, dz, *sums, dinitial if state is None else dinitial.to(state.dtype)]


scan = differentiable_op(
    "hf_hybrid_ssm::longhorn_scan_triton",
    ScanInputs,
    _forward,
    _backward,
    _empty,
    saved=lambda inputs, outputs: (inputs, outputs[2:]),
)
