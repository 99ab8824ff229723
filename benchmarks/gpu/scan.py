"""(b) The Longhorn scan against a copy of its bytes, and Mamba's scan of as many channels and states.

That is mamba_ssm's kernel where it is installed, and what torch compiles of transformers' associative scan.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.comparing import compare
from benchmarks.gpu.settings import Settings
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

Run = Callable[[], Any]
Shape = tuple[int, int, int, int]  # batch, length, channels, states
SHAPES = [(8, 2048, 1536, 16), (1, 65536, 1536, 16), (8, 2048, 1536, 64), (8, 2048, 4096, 16), (64, 256, 1536, 16)]
TINY = [(1, 16, 64, 16), (2, 16, 64, 16)]
BLOCKS = (32, 16)  # tokens between checkpoints, fewer than the table's


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The first shape with its blocks and peers, then the others; a peer apart, since it may compile for long."""
    first, *others = settings.pick(SHAPES, TINY)
    yield from against_copy(settings, first)
    for block in BLOCKS:
        yield f"{first} forward and backward, block of {block}", partial(block_of, settings, first, block)
    for package, (peer, prepared) in PEERS.items():
        for backward in (False, True) if importlib.util.find_spec(package) else ():
            yield f"{first} {KINDS[backward]}, {peer}", partial(against, settings, first, backward, peer, prepared)
    for shape in others:
        yield from against_copy(settings, shape)


def against_copy(settings: Settings, shape: Shape) -> Iterator[tuple[str, Callable[[], dict]]]:
    for backward in (False, True):
        yield f"{shape} {KINDS[backward]}", partial(scan, settings, shape, backward)


def scan(settings: Settings, shape: Shape, backward: bool) -> dict:
    kernel = "triton" if settings.device == "cuda" else "torch"
    moved = bytes_moved(*shape, settings.dtype.itemsize, backward)
    ours = longhorn(settings, shape, backward, kernel)
    found = compare({"ours": ours, "copy of its bytes": copy(moved, settings.device)}, settings)
    rate = moved / found["milliseconds"]["ours"] / 1e6
    return {**found, "bytes": moved, "gigabytes_per_second": round(rate, 1)}


def against(settings: Settings, shape: Shape, backward: bool, peer: str, prepared: Callable[..., Run]) -> dict:
    kernel = "triton" if settings.device == "cuda" else "torch"
    ours = longhorn(settings, shape, backward, kernel)
    return compare({"ours": ours, peer: prepared(settings, shape, backward)}, settings)


def block_of(settings: Settings, shape: Shape, block: int) -> dict:
    """The scan with checkpoints after so many tokens; what `triton_tune` chooses among."""
    kernel = "triton" if settings.device == "cuda" else "torch"
    ours = with_block(longhorn(settings, shape, True, kernel), shape[3], block, settings)
    return compare({"ours": ours, "with the table's": longhorn(settings, shape, True, kernel)}, settings)


def with_block(run: Run, states: int, block: int, settings: Settings) -> Run:
    if not settings.has_triton:
        return run
    from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes

    def measured() -> None:
        name = triton_sizes.block_class(states, str(settings.dtype))
        triton_sizes.MEASURING[name] = {"BLOCK": block}
        try:
            run()
        finally:
            del triton_sizes.MEASURING[name]

    return measured


def bytes_moved(batch: int, length: int, channels: int, states: int, size: int, backward: bool) -> int:
    """Read and written at least: x, dt, z, k, q and y; with the backward those again, dy, and five gradients."""
    wide, narrow = batch * length * channels, batch * length * states
    forward = 4 * wide + 2 * narrow
    return size * (forward + (4 * wide + 2 * narrow + 3 * wide + 2 * narrow if backward else 0))


def run_of(op: Run, inputs: list[torch.Tensor], backward: bool) -> Run:
    """A forward, or a forward and the gradients of the inputs."""

    def run() -> None:
        with torch.set_grad_enabled(backward):
            y = op()
            y = y[0] if isinstance(y, tuple) else y
            if backward:
                torch.autograd.grad(y, inputs, torch.ones_like(y))

    return run


def tensors(settings: Settings, *shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    options = {"device": settings.device, "dtype": dtype or settings.dtype}
    make = torch.empty if settings.only_launches else torch.randn
    return [make(shape, **options).requires_grad_() for shape in shapes]


def longhorn(settings: Settings, shape: tuple, backward: bool, kernel: str) -> Run:
    batch, length, channels, states = shape
    x, dt, z, k, q = tensors(settings, *[(batch, length, channels)] * 3, *[(batch, length, states)] * 2)
    bias, skip = tensors(settings, (channels,), (channels,), dtype=torch.float32)
    inputs = [x, dt, k, q, z, bias, skip]
    return run_of(lambda: longhorn_scan(x, dt, k, q, beta_bias=bias, D=skip, z=z, backend=kernel)[0], inputs, backward)


def copy(moved: int, device: str) -> Run:
    source = torch.zeros(moved // 2, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def mamba_inputs(settings: Settings, shape: Shape) -> list[torch.Tensor]:
    """x, time steps, A, B, C, the skip, the gate and the bias of time steps, as mamba_ssm lays them out."""
    batch, length, channels, states = shape
    x, dt, z, b, c = tensors(settings, *[(batch, channels, length)] * 3, *[(batch, states, length)] * 2)
    a, skip, bias = tensors(settings, (channels, states), (channels,), (channels,), dtype=torch.float32)
    return [x, dt, a.detach().exp().neg().requires_grad_(), b, c, skip, z, bias]


def mamba_ssm(settings: Settings, shape: Shape, backward: bool) -> Run:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    inputs = mamba_inputs(settings, shape)
    return run_of(lambda: selective_scan_fn(*inputs, True), inputs, backward)


def transformers_mamba(settings: Settings, shape: Shape, backward: bool) -> Run:
    """Compiled, which alone takes the associative scan; a rehearsal traces without a compiler."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    options: dict[str, Any] = {} if settings.device == "cuda" else {"backend": "eager"}
    compiled = torch.compile(mamba_selective_scan, dynamic=False, **options)
    inputs = mamba_inputs(settings, shape)
    return run_of(lambda: compiled(*inputs, delta_softplus=True, use_associative_scan=True), inputs, backward)


PEERS = {
    "transformers": ("transformers' Mamba, compiled", transformers_mamba),
    "mamba_ssm": ("mamba_ssm", mamba_ssm),
}
"""By package."""
KINDS = ("forward", "forward and backward")
