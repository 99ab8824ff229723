"""Measures tile sizes of the Triton scan on this machine's card and keeps the fastest for the launches to come.

    python -m hf_hybrid_ssm.ops.longhorn_scan.triton_tune --batch 8 --length 2048 --width 1536 --states 16

A candidate has to agree with the sizes of the table before it is timed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPEATS = 20


def candidates(num_states: int, *, backward: bool) -> Iterator[dict[str, int]]:
    """Sizes that can be compiled and are worth a measurement, those of the table first."""
    table = triton_sizes.tile_sizes(num_states, backward=backward)
    first = {name: table[name] for name in triton_sizes.NAMES}
    yield first
    states = table["S"] * table["P"]
    for lane_states in sorted({min(size, states) for size in (4, 8, 16)}):
        for width in (16, 32, 64):
            lanes = states // lane_states * width  # of a program, if a lane has one channel
            for num_warps in sorted({max(1, lanes // 32), max(1, lanes // 64)}):
                for tokens in (2, 4, 8) if backward else (4, 8, 16):
                    for stages in (2, 3):
                        sizes = dict(zip(triton_sizes.NAMES, (width, tokens, lane_states, num_warps, stages)))
                        if num_warps <= 16 and sizes != first and _fits(sizes, lanes, backward):
                            yield sizes


def _fits(sizes: dict[str, int], lanes: int, backward: bool) -> bool:
    """Whether the states that a lane holds leave it enough of its 255 registers."""
    held = sizes["S"] * max(1, lanes // (32 * sizes["num_warps"]))
    return held * (sizes["T"] + 1) <= 96 if backward else held <= 32


def tune(batch: int, length: int, width: int, num_states: int, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """The fastest sizes of both directions, written to the file that the launches read; → what was written.

    Raises:
        RuntimeError: there is no CUDA device, or no candidate ran.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "Tuning measures kernels on a CUDA device, and there is none; the table's sizes stay in use."
        )
    device, found = torch.cuda.get_device_name(), {}
    inputs = _inputs(batch, length, width, num_states, dtype)
    in_chunks = triton_sizes.chunk_sizes(num_states, str(dtype))
    if in_chunks is not None:
        print("the backward takes its tokens in chunks, in tiles whose sizes are fixed: only the forward is tuned")
    for backward in (False,) if in_chunks is not None else (False, True):
        name = triton_sizes.shape_class(batch * width, length, num_states, str(dtype), backward=backward)
        found[name] = _fastest(name, candidates(num_states, backward=backward), inputs, backward)
        triton_sizes.MEASURING[name] = found[name]  # of what is timed next
    try:
        name = triton_sizes.block_class(num_states, str(dtype))
        blocks = ({"BLOCK": tokens} for tokens in triton_sizes.BLOCKS)
        found[name] = _fastest(name, blocks, inputs, backward=True)
    finally:
        triton_sizes.MEASURING.clear()
    path = triton_sizes.tuned_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"sizes": triton_sizes.tuned(device) | found}, indent=1) + "\n", encoding="utf-8")
    triton_sizes.tuned.cache_clear()
    return found


def _fastest(name: str, sizes: Iterable[dict[str, int]], inputs: list[torch.Tensor], backward: bool) -> dict[str, int]:
    """Of sizes of a class, the table's first; those that do not run or do not agree with the first are left out."""
    times: list[tuple[float, dict[str, int]]] = []
    expected = None
    for each in sizes:
        triton_sizes.MEASURING[name] = each
        try:
            values = _run(inputs, backward)
            expected = expected or values
            for got, want in zip(values, expected):
                torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
            times.append((_milliseconds(inputs, backward), each))
        except (RuntimeError, AssertionError, CompilationError, OutOfResources) as error:
            print(f"{name} {each}: {type(error).__name__}", file=sys.stderr)
        finally:
            del triton_sizes.MEASURING[name]
    if not times:
        raise RuntimeError(f"No candidate for {name} ran; see above.")
    best, found = min(times, key=lambda entry: entry[0])
    print(f"{name}: {best:.3f} ms with {found}, {times[0][0]:.3f} ms with the table's")
    return found


def _inputs(batch: int, length: int, width: int, num_states: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator("cuda").manual_seed(0)
    shapes = [(batch, length, width)] * 2 + [(batch, length, num_states)] * 2 + [(batch, length, width)]
    draw: dict[str, Any] = {"generator": random, "device": "cuda", "dtype": dtype}
    return [torch.randn(shape, **draw).requires_grad_() for shape in shapes]


def _run(inputs: list[torch.Tensor], backward: bool) -> tuple:
    from hf_hybrid_ssm.ops.longhorn_scan.triton import longhorn_scan_triton

    x, logit, k, q, z = inputs
    y, _ = longhorn_scan_triton(x, logit, k, q, z=z)
    return torch.autograd.grad(y, inputs, torch.ones_like(y)) if backward else (y,)


def _milliseconds(inputs: list[torch.Tensor], backward: bool) -> float:
    """The median of several runs; those of a backward hold its forward, which all candidates share."""
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        _run(inputs, backward)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1536, help="channels of the scan")
    parser.add_argument("--states", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args()
    try:
        tune(options.batch, options.length, options.width, options.states, DTYPES[options.dtype])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
