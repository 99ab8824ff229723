"""(d) The Longhorn scan against a copy of its bytes, and the scans of mamba_ssm and flash-linear-attention."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.comparing import compare
from benchmarks.gpu.settings import Settings
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

Run = Callable[[], Any]
# batch, length, channels, states
SHAPES = [(8, 2048, 1536, 16), (1, 65536, 1536, 16), (8, 2048, 1536, 64), (8, 2048, 4096, 16), (64, 256, 1536, 16)]
TINY = [(1, 16, 64, 16)]
BLOCKS = (32, 16)  # tokens between checkpoints, fewer than the table's
HEAD = 64  # channels of a head in peers that have heads


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for shape in settings.pick(SHAPES, TINY):
        for backward in (False, True):
            name = f"{shape} {'forward and backward' if backward else 'forward'}"
            yield name, lambda s=shape, b=backward: scan(settings, s, b)
    for block in BLOCKS:
        shape = settings.pick(SHAPES, TINY)[0]
        yield f"{shape} forward and backward, block of {block}", lambda s=shape, b=block: block_of(settings, s, b)


def scan(settings: Settings, shape: tuple[int, int, int, int], backward: bool) -> dict:
    kernel = "triton" if settings.device == "cuda" else "torch"
    moved = bytes_moved(*shape, settings.dtype.itemsize, backward)
    candidates = {
        "ours": longhorn(settings, shape, backward, kernel),
        "copy of its bytes": copy(moved, settings.device),
        "mamba_ssm selective scan": selective_scan(settings, shape, backward),
        "mamba_ssm chunk scan (Mamba2)": mamba2_scan(settings, shape, backward),
        "fla chunk_gla": gla(settings, shape, backward),
    }
    found = compare(candidates, settings)
    rate = moved / found["milliseconds"]["ours"] / 1e6
    return {**found, "bytes": moved, "gigabytes_per_second": round(rate, 1)}


def block_of(settings: Settings, shape: tuple[int, int, int, int], block: int) -> dict:
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
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


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


def selective_scan(settings: Settings, shape: tuple, backward: bool) -> Run:
    """Mamba's, of the same channels and states."""
    batch, length, channels, states = shape

    def prepared() -> Run:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        x, dt, z, b, c = tensors(settings, *[(batch, channels, length)] * 3, *[(batch, 1, states, length)] * 2)
        a, skip, bias = tensors(settings, (channels, states), (channels,), (channels,), dtype=torch.float32)
        a = a.detach().exp().neg().requires_grad_()
        inputs = [x, dt, z, b, c, a, skip, bias]
        return run_of(lambda: selective_scan_fn(x, dt, a, b, c, skip, z, bias, True), inputs, backward)

    return lazily(prepared)


def mamba2_scan(settings: Settings, shape: tuple, backward: bool) -> Run:
    """Mamba2's, of the same channels in heads; one decay a head."""
    batch, length, channels, states = shape

    def prepared() -> Run:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        heads = channels // HEAD
        x, dt = tensors(settings, (batch, length, heads, HEAD), (batch, length, heads))
        b, c = tensors(settings, *[(batch, length, 1, states)] * 2)
        (a,) = tensors(settings, (heads,), dtype=torch.float32)
        a = a.detach().exp().neg().requires_grad_()
        return run_of(
            lambda: mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=256, dt_softplus=True),
            [x, dt, a, b, c],
            backward,
        )

    return lazily(prepared)


def gla(settings: Settings, shape: tuple, backward: bool) -> Run:
    """Gated linear attention with as many channels and states, in heads."""
    batch, length, channels, states = shape

    def prepared() -> Run:
        from fla.ops.gla import chunk_gla

        heads = channels // HEAD
        q, k, gate = tensors(settings, *[(batch, length, heads, states)] * 3)
        (v,) = tensors(settings, (batch, length, heads, HEAD))
        return run_of(lambda: chunk_gla(q, k, v, torch.nn.functional.logsigmoid(gate)), [q, k, v, gate], backward)

    return lazily(prepared)


def lazily(prepared: Callable[[], Run]) -> Run:
    """Imports and allocates on the first call, where a failure is recorded for this candidate alone."""
    ready: list[Run] = []

    def run() -> None:
        if not ready:
            ready.append(prepared())
        ready[0]()

    return run
