"""The Longhorn scan on CPU: C kernel, torch and torch compiled, against the machine's own limits and transformers'
Mamba; three ways to write such a kernel; and the scan's share of a whole block.

Width 1536 (a model of 768), state 16, one row of 2048, float32. The copy moves as many bytes as the scan must, which
reads x, dt, k and q and writes y. "numba" is the same scan written for that compiler, forward only.
"""

import argparse

import numba
import numpy as np
import torch
from timing import paired_seconds, write_results
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from hf_hybrid_ssm import LonghornConfig, LonghornModel
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

WIDTH, STATE = 1536, 16
LANES = 16


@numba.njit(fastmath=True, parallel=True)
def numba_scan(x, dt, k, q, y):
    """x, dt, y (L, D); k, q (L, N): sixteen channels at a time, one thread a group of channels."""
    length, width = x.shape
    states = k.shape[1]
    for tile in numba.prange(width // LANES):
        first = tile * LANES
        h = np.zeros((states, LANES), np.float32)
        for t in range(length):
            norm = np.float32(0)
            for n in range(states):
                norm += k[t, n] * k[t, n]
            delta = np.empty(LANES, np.float32)
            out = np.zeros(LANES, np.float32)
            for i in range(LANES):
                delta[i] = np.float32(1) / (np.exp(-dt[t, first + i]) + np.float32(1) + norm)
            for n in range(states):
                for i in range(LANES):
                    h[n, i] += delta[i] * k[t, n] * (x[t, first + i] - h[n, i] * k[t, n])
                    out[i] += h[n, i] * q[t, n]
            for i in range(LANES):
                y[t, first + i] = out[i]


def inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, length, WIDTH)] * 2 + [(1, length, STATE)] * 2
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def scan(length: int, backend: str, backward: bool):
    tensors = inputs(length)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            y, _ = longhorn_scan(*tensors, backend=backend)
            if backward:
                torch.autograd.grad(y, tensors, torch.ones_like(y))

    return run


def on_one_thread(run):
    """Many small operations may be faster so than on threads that wake for each of them."""

    def alone() -> None:
        torch.set_num_threads(1)
        run()
        torch.set_num_threads(2)

    return alone


def compiled_scan(length: int):
    tensors = [tensor.detach() for tensor in inputs(length)]
    compiled = torch.compile(lambda *t: longhorn_scan(*t, backend="torch")[0])

    def run() -> None:
        with torch.inference_mode():
            compiled(*tensors)

    return run


def forward(length: int, rounds: int) -> dict:
    """Seconds of a forward, and what the machine could do at best."""
    x, dt, k, q = (tensor.detach() for tensor in inputs(length))
    y = torch.empty_like(x)
    expected = longhorn_scan(x, dt, k, q, backend="reference")[0]
    arrays = [tensor.squeeze(0).numpy() for tensor in (x, dt, k, q, y)]
    numba_scan(*arrays)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    moved = sum(tensor.numel() for tensor in (x, dt, k, q, y))
    source = torch.empty(moved // 2)
    target = torch.empty_like(source)
    candidates = {
        "C": scan(length, "native", False),
        "numba": lambda: numba_scan(*arrays),
        "torch": scan(length, "torch", False),
        "torch, one thread": on_one_thread(scan(length, "torch", False)),
        "torch, compiled": compiled_scan(length),
        "copy of as many bytes": lambda: target.copy_(source),
    }
    seconds = paired_seconds(candidates, rounds=rounds, warm_up=3)
    return {
        "milliseconds": {name: round(1000 * value, 3) for name, value in seconds.items()},
        "megabytes_moved_at_least": round(4 * moved / 1e6, 1),
        "C_gigabytes_per_second": round(4 * moved / seconds["C"] / 1e9, 1),
        "C_times_the_copy": round(seconds["C"] / seconds["copy of as many bytes"], 2),
        "C_times_as_fast_as_torch": round(min(seconds["torch"], seconds["torch, one thread"]) / seconds["C"], 1),
    }


def forward_and_backward(length: int, rounds: int) -> dict:
    candidates = {"C": scan(length, "native", True), "torch": scan(length, "torch", True)}
    candidates["torch, one thread"] = on_one_thread(candidates["torch"])
    seconds = paired_seconds(candidates, rounds=rounds)
    return {
        "milliseconds": {name: round(1000 * value, 2) for name, value in seconds.items()},
        "C_times_as_fast_as_torch": round(min(seconds["torch"], seconds["torch, one thread"]) / seconds["C"], 1),
    }


def share_of_the_block(length: int, rounds: int) -> dict:
    """The scan within one layer of width 768, forward and backward."""
    torch.manual_seed(0)
    config = LonghornConfig(vocab_size=8, hidden_size=WIDTH // 2, num_hidden_layers=1, state_size=STATE)
    block = LonghornModel(config).layers[0].train()
    x = torch.randn(1, length, WIDTH // 2, requires_grad=True)

    def whole() -> None:
        y = block(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()

    seconds = paired_seconds({"block": whole, "scan": scan(length, "native", True)}, rounds=rounds)
    return {
        "milliseconds": {name: round(1000 * value, 2) for name, value in seconds.items()},
        "share": round(seconds["scan"] / seconds["block"], 3),
    }


def mamba_loop(length: int) -> float:
    """Seconds of the layer of transformers' Mamba in its plain torch path, scan and projections; run twice."""
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=WIDTH // 2, state_size=STATE, num_hidden_layers=1, use_mambapy=False)
    mixer, x = MambaMixer(config, 0), torch.randn(1, length, WIDTH // 2)

    def run() -> None:
        with torch.inference_mode():
            mixer(x)

    return paired_seconds({"mamba": run}, rounds=2, warm_up=1)["mamba"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    numba.set_num_threads(2)
    length, rounds = arguments.length, arguments.rounds
    figures = {
        "shape": {"width": WIDTH, "state": STATE, "length": length, "dtype": "float32"},
        "forward": forward(length, rounds),
        "forward_and_backward": forward_and_backward(length, rounds),
        "share_of_the_block": share_of_the_block(length, rounds),
        "mamba_layer_forward_milliseconds": round(1000 * mamba_loop(length), 1),
    }
    write_results("longhorn_scan", figures)


if __name__ == "__main__":
    main()
