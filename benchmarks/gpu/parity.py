"""(a) Outputs and gradients of every kernel on this device against float64, odd shapes and very long rows included."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu import parity_recurrences
from benchmarks.gpu.parity_compared import compared, judged, masked, random, relative, row_options
from benchmarks.gpu.settings import Settings
from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.implicit_attention import implicit_attention
from hf_hybrid_ssm.ops.local_attention import local_attention
from hf_hybrid_ssm.ops.long_conv import long_conv
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

# batch, length, channels, states
SCANS = [(2, 2048, 1536, 16), (3, 67, 130, 17), (1, 1, 1, 1), (1, 513, 70, 64), (1, 129, 33, 256)]
EVERY_KIND = [(2, 2048, 1536, 16), (3, 67, 130, 17)]
MANY_STATES = [(2, 300, 96, 32), (1, 513, 70, 64), (1, 129, 33, 256)]  # from 32 on, 16 bits go back in chunks
ROWS = ("plain", "padded", "packed")
CONVOLUTIONS = [(1, 1, 1, 2), (3, 67, 130, 4), (2, 2048, 1536, 4)]  # batch, length, channels, taps
LONG_CONVOLUTIONS = [(1, 90, 3, 70), (8, 2048, 24, 2048), (2, 8192, 8, 8192), (1, 20000, 4, 4096)]
TINY_LONG_CONVOLUTIONS = [(1, 70, 2, 66)]
WINDOW, TINY_WINDOW = (2, 12, 1024, 64, 128), (1, 2, 13, 8, 5)  # batch, heads, length, size, window
WINDOWS = {"biased": torch.float32, "packed": torch.bfloat16, "sink with a value": torch.bfloat16}
# batch, length, channels, order, rows; of the one long row, segments are done side by side
MEMORIES = [
    (2, 67, 35, 6, 2),
    (1, 300, 130, 33, 11),
    (2, 1024, 512, 50, 5),
    (2, 512, 256, 220, 22),
    (1, 20000, 32, 8, 2),
]
TINY_MEMORIES = [(1, 20, 3, 4, 2)]
LONG = 300_000
WIDE = 8192  # elements from token to token: the last offset of a row exceeds 2^31


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    kernel = "triton" if settings.has_triton else "torch"
    for dtype, scans, convolutions in by_dtype(settings):
        name = str(dtype).removeprefix("torch.")
        for shape, kinds in scans.items():
            for rows in kinds:
                yield (
                    f"longhorn_scan {shape} {rows} {name}",
                    lambda s=shape, r=rows, d=dtype: scan(settings, s, r, d, kernel),
                )
        for shape in convolutions:
            for rows in ("plain", "packed"):
                yield (
                    f"causal_conv {shape} {rows} {name}",
                    lambda s=shape, r=rows, d=dtype: short(settings, s, r, d, kernel),
                )
    for shape in settings.pick(LONG_CONVOLUTIONS, TINY_LONG_CONVOLUTIONS):
        for rows in ("plain", "packed"):
            yield f"long_conv {shape} {rows}", lambda s=shape, r=rows: long(settings, s, r, kernel)
    for shape in settings.pick(MEMORIES, TINY_MEMORIES):
        for dtype in (torch.float32,) if settings.rehearse else (torch.float32, torch.bfloat16):
            for rows in ROWS if shape[1] < 100 else ("plain",):
                yield (
                    f"implicit_attention {shape} {rows} {str(dtype).removeprefix('torch.')}",
                    lambda s=shape, r=rows, d=dtype: implicit(settings, s, r, d, kernel),
                )
    length = settings.pick(1024 if settings.only_launches else LONG, 40)
    for rows in (1, 2):
        yield f"longhorn_scan over {length} tokens, {rows} rows", lambda b=rows: long_scan(settings, b, length, kernel)
    yield f"causal_conv over {length} tokens", lambda: long_short(settings, length, kernel)
    yield from parity_recurrences.cases(settings, kernel)
    for extra, dtype in WINDOWS.items():  # last: each is compiled there
        yield f"local_attention {extra} {dtype}".replace("torch.", ""), partial(window, settings, extra, dtype)


def by_dtype(settings: Settings) -> Iterator[tuple[torch.dtype, dict[tuple, tuple[str, ...]], list[tuple]]]:
    """Scans with the kinds of their rows, and short convolutions; each kind and dtype is compiled anew, so few."""
    if settings.rehearse:
        yield torch.float32, {(1, 1, 1, 1): ("plain",), (2, 5, 3, 3): ROWS}, [(2, 5, 3, 4)]
        return
    yield torch.float32, {shape: ROWS if shape in EVERY_KIND else ("plain",) for shape in SCANS}, CONVOLUTIONS
    many = dict.fromkeys(MANY_STATES[:1], ROWS) | dict.fromkeys(MANY_STATES[1:], ROWS[:1])
    yield torch.bfloat16, dict.fromkeys(EVERY_KIND, ROWS) | many, CONVOLUTIONS


def scan(settings: Settings, shape: tuple, rows: str, dtype: torch.dtype, kernel: str) -> dict:
    batch, length, channels, states = shape
    inputs = {name: random(batch, length, channels, seed=i) for i, name in enumerate(("x", "beta_logit", "z"))}
    inputs |= {name: random(batch, length, states, seed=3 + i) for i, name in enumerate("kq")}
    inputs |= {"beta_bias": random(channels, seed=6), "D": random(channels, seed=7)}
    inputs["initial_state"] = random(batch, channels, states, seed=8)
    options = row_options(rows, batch, length) | {"return_final_state": True}
    if rows == "padded":  # outputs there are meaningless, and gradients of the gate with them
        real = torch.arange(length) < options["lengths"].unsqueeze(1)
        inputs["z"] = inputs["z"] * real.unsqueeze(2)
        return compared(masked(longhorn_scan, real), inputs, options, settings, dtype, backend=kernel)
    return compared(longhorn_scan, inputs, options, settings, dtype, backend=kernel, by_blocks=length > 1000)


def short(settings: Settings, shape: tuple, rows: str, dtype: torch.dtype, kernel: str) -> dict:
    batch, length, channels, taps = shape
    inputs = {"x": random(batch, length, channels, seed=1), "weight": random(channels, taps, seed=2)}
    inputs |= {"bias": random(channels, seed=3), "initial_state": random(batch, taps - 1, channels, seed=4)}
    options = row_options(rows, batch, length) | {"activation": "silu", "return_final_state": True}
    return compared(causal_conv, inputs, options, settings, dtype, backend=kernel, by_blocks=length > 1000)


def long(settings: Settings, shape: tuple, rows: str, kernel: str) -> dict:
    batch, length, channels, taps = shape
    decay = torch.exp(-torch.arange(taps) / taps * 4)
    inputs = {"u": random(batch, length, channels, seed=1), "kernel": random(channels, taps, seed=2) * decay}
    inputs["skip"] = random(channels, seed=3)
    options = row_options(rows, batch, length)
    return compared(
        long_conv, inputs, options, settings, torch.float32, backend=kernel, by_blocks=length * taps > 10**6
    )


def implicit(settings: Settings, shape: tuple, rows: str, dtype: torch.dtype, kernel: str) -> dict:
    batch, length, channels, order, reduced = shape
    inputs = {"x": random(batch, length, channels, seed=1), "weight": random(3, reduced, order, seed=2) / order**0.5}
    inputs |= {"bias": random(3, reduced, seed=3), "collapse": random(reduced, seed=4)}
    inputs |= {"collapse_bias": random(1, seed=5), "initial_state": random(batch, order, channels, seed=6)}
    options = row_options(rows, batch, length) | {"theta": 2.0 * order, "scale": 1 / channels}
    options |= {"return_final_state": True}
    op = masked(implicit_attention, torch.arange(length) < options.get("lengths", torch.tensor(length)).view(-1, 1))
    return compared(op, inputs, options, settings, dtype, backend=kernel, by_blocks=length > 100)


def window(settings: Settings, extra: str, dtype: torch.dtype) -> dict:
    """The backend that is taken by itself: on CUDA it depends on what is asked."""
    batch, heads, length, size, width = settings.pick(WINDOW, TINY_WINDOW)
    dtype = torch.float32 if settings.rehearse else dtype
    inputs = {name: random(batch, heads, length, size, seed=i) for i, name in enumerate("qkv")}
    if extra == "biased":
        inputs["bias"] = random(heads, width, seed=4)
    if extra == "sink with a value":
        inputs |= {"sink_logits": random(batch, heads, length, seed=5), "sink_values": random(heads, size, seed=6)}
    options = {"window": (width - 1, 0)} | row_options(extra, batch, length)
    return compared(local_attention, inputs, options, settings, dtype, by_blocks=length > 200)


def wide_view(rows: int, length: int, channels: int, settings: Settings, seed: int) -> torch.Tensor:
    """(rows, length, channels) in bfloat16 whose tokens lie `WIDE` elements apart."""
    step = settings.pick(WIDE, 16)
    memory = torch.zeros(rows, length, step, dtype=torch.bfloat16, device=settings.device)
    memory[..., :channels] = random(rows, length, channels, seed=seed).to(settings.device, torch.bfloat16)
    return memory[..., :channels]


def long_scan(settings: Settings, rows: int, length: int, kernel: str) -> dict:
    """Rows of which the last token's offset needs 64 bits; the exact side reads dense copies in float64."""
    channels, states = 8, 4
    x, beta_logit = (wide_view(rows, length, channels, settings, seed) for seed in (1, 2))
    k, q = (random(rows, length, states, seed=seed).to(settings.device, torch.bfloat16) for seed in (3, 4))
    got, state = longhorn_scan(x, beta_logit, k, q, rows=Rows(return_final_state=True), backend=kernel)
    exact = [t.double().contiguous() for t in (x, beta_logit, k, q)]
    want, want_state = longhorn_scan(*exact, rows=Rows(return_final_state=True), backend="torch")
    return judged({"y": relative(got, want), "state": relative(state, want_state)}, torch.bfloat16)


def long_short(settings: Settings, length: int, kernel: str) -> dict:
    x = wide_view(1, length, 8, settings, seed=1)
    weight = random(8, 4, seed=2).to(settings.device, torch.bfloat16)
    got, _ = causal_conv(x, weight, backend=kernel)
    want, _ = causal_conv(x.double().contiguous(), weight.double(), backend="torch")
    return judged({"y": relative(got, want)}, torch.bfloat16)
