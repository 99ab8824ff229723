"""(d) The long convolution against cuFFT, 512 to 65,536 taps, as many as the row has tokens."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.comparing import compare
from benchmarks.gpu.scan import copy, run_of, tensors
from benchmarks.gpu.settings import Settings
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.long_conv import long_conv

CHANNELS = 768
TOKENS = 65536  # rows times length


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for taps in settings.pick((512, 2048, 8192, 65536), (32,)):
        for rows in ("plain", "packed"):
            for backward in (False, True):
                name = f"{taps} taps {rows} {'forward and backward' if backward else 'forward'}"
                yield name, lambda t=taps, r=rows, b=backward: convolution(settings, t, r, b)


def convolution(settings: Settings, taps: int, rows: str, backward: bool) -> dict:
    batch, channels = max(1, settings.pick(TOKENS, 32) // taps), settings.pick(CHANNELS, 4)
    u, kernel = tensors(settings, (batch, taps, channels), (channels, taps), dtype=torch.float32)
    documents = PLAIN_ROWS
    if rows == "packed":
        seq_idx = (torch.arange(taps, device=settings.device) // (-(-taps // 4))).expand(batch, -1)
        documents = Rows.of(seq_idx=seq_idx)

    def fft() -> torch.Tensor:
        """Of whole rows: packed ones as if they were not, the least that any FFT costs."""
        spectrum = torch.fft.rfft(u, 2 * taps, dim=1) * torch.fft.rfft(kernel, 2 * taps).T
        return torch.fft.irfft(spectrum, 2 * taps, dim=1)[:, :taps]

    inputs = [u, kernel]
    moved = 4 * (2 * u.numel() + kernel.numel()) * (3 if backward else 1)
    candidates = {
        "ours": run_of(lambda: long_conv(u, kernel, rows=documents)[0], inputs, backward),
        "our torch backend": run_of(
            lambda: long_conv(u, kernel, rows=documents, backend="torch")[0], inputs, backward
        ),
        "cuFFT": run_of(fft, inputs, backward),
        "copy of its bytes": copy(moved, settings.device),
    }
    found = compare(candidates, settings)
    rate = moved / found["milliseconds"]["ours"] / 1e6
    return {**found, "batch": batch, "bytes": moved, "gigabytes_per_second": round(rate, 1)}
