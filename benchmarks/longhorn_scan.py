"""How far is the Longhorn scan from the time of moving its bytes, how far ahead of plain torch and of Mamba's in
transformers; what does it take of a whole block?

Width 1536 (a model of 768), state 16, one row of 2048, float32; the kernel is C on a CPU and Triton on CUDA. The copy
moves as many bytes as the scan must, which reads x, dt, k and q and writes y.
"""

import argparse
from collections.abc import Callable

import torch
from timing import machine_arguments, paired_seconds, write_results
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from hf_hybrid_ssm import LonghornConfig, LonghornModel
from hf_hybrid_ssm.ops.core.dispatch import KERNEL_OF
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

WIDTH, STATE = 1536, 16
LABEL = {"cpu": "C", "cuda": "Triton"}


def inputs(length: int, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, length, WIDTH)] * 2 + [(1, length, STATE)] * 2
    return [torch.randn(size, generator=generator).to(device).requires_grad_() for size in sizes]


def scan(length: int, backend: str, backward: bool, device: str = "cpu"):
    tensors = inputs(length, device)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            y, _ = longhorn_scan(*tensors, backend=backend)
            if backward:
                torch.autograd.grad(y, tensors, torch.ones_like(y))

    return run


def copy(elements: int, device: str) -> Callable[[], None]:
    """Reads and writes `elements` float32 numbers in all."""
    source = torch.zeros(elements // 2, device=device)
    target = torch.zeros_like(source)

    def run() -> None:
        target.copy_(source)

    return run


def moved(length: int) -> int:
    """Numbers that a forward reads or writes at least."""
    return length * (3 * WIDTH + 2 * STATE)


def on_one_thread(run):
    """Many small operations may be faster so than on threads that wait in a loop for each other."""
    threads = torch.get_num_threads()

    def alone() -> None:
        torch.set_num_threads(1)
        run()
        torch.set_num_threads(threads)

    return alone


def compiled_scan(length: int, device: str):
    tensors = [tensor.detach() for tensor in inputs(length, device)]
    compiled = torch.compile(lambda *t: longhorn_scan(*t, backend="torch")[0])

    def run() -> None:
        with torch.inference_mode():
            compiled(*tensors)

    return run


def forward(length: int, rounds: int, device: str) -> dict:
    """Seconds of a forward, and what the machine could do at best."""
    kernel = LABEL[device]
    candidates = {
        kernel: scan(length, KERNEL_OF[device], False, device),
        "torch": scan(length, "torch", False, device),
    }
    if device == "cpu":
        candidates["torch, one thread"] = on_one_thread(candidates["torch"])
    candidates |= {
        "torch, compiled": compiled_scan(length, device),
        "copy of as many bytes": copy(moved(length), device),
    }
    seconds = paired_seconds(candidates, rounds=rounds, warm_up=3, device=device)
    torch_seconds = min(value for name, value in seconds.items() if name in ("torch", "torch, one thread"))
    return {
        "milliseconds": milliseconds(seconds),
        "megabytes_moved_at_least": round(4 * moved(length) / 1e6, 1),
        f"{kernel}_gigabytes_per_second": round(4 * moved(length) / seconds[kernel] / 1e9, 1),
        f"{kernel}_times_the_copy": round(seconds[kernel] / seconds["copy of as many bytes"], 2),
        f"{kernel}_times_as_fast_as_torch": round(torch_seconds / seconds[kernel], 1),
    }


def forward_and_backward(length: int, rounds: int, device: str) -> dict:
    kernel = LABEL[device]
    candidates = {kernel: scan(length, KERNEL_OF[device], True, device), "torch": scan(length, "torch", True, device)}
    if device == "cpu":
        candidates["torch, one thread"] = on_one_thread(candidates["torch"])
    seconds = paired_seconds(candidates, rounds=rounds, device=device)
    best = min(value for name, value in seconds.items() if name != kernel)
    return {
        "milliseconds": milliseconds(seconds),
        f"{kernel}_times_as_fast_as_torch": round(best / seconds[kernel], 1),
    }


def share_of_the_block(length: int, rounds: int, device: str) -> dict:
    """The scan within one layer of width 768, forward and backward."""
    torch.manual_seed(0)
    config = LonghornConfig(vocab_size=8, hidden_size=WIDTH // 2, num_hidden_layers=1, state_size=STATE)
    block = LonghornModel(config).layers[0].train().to(device)
    x = torch.randn(1, length, WIDTH // 2, device=device, requires_grad=True)

    def whole() -> None:
        y = block(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()

    candidates = {"block": whole, "scan": scan(length, KERNEL_OF[device], True, device)}
    seconds = paired_seconds(candidates, rounds=rounds, device=device)
    return {"milliseconds": milliseconds(seconds), "share": round(seconds["scan"] / seconds["block"], 3)}


def mamba_loop(length: int, device: str) -> float:
    """Seconds of the layer of transformers' Mamba in its plain torch path, scan and projections; run twice."""
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=WIDTH // 2, state_size=STATE, num_hidden_layers=1, use_mambapy=False)
    mixer, x = MambaMixer(config, 0).to(device), torch.randn(1, length, WIDTH // 2, device=device)

    def run() -> None:
        with torch.inference_mode():
            mixer(x)

    return paired_seconds({"mamba": run}, rounds=2, warm_up=1, device=device)["mamba"]


def milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1000 * value, 3) for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = machine_arguments(parser)
    device, length, rounds = arguments.device, arguments.length, arguments.rounds
    figures = {
        "shape": {"width": WIDTH, "state": STATE, "length": length, "dtype": "float32"},
        "forward": forward(length, rounds, device),
        "forward_and_backward": forward_and_backward(length, max(3, rounds // 2), device),
        "share_of_the_block": share_of_the_block(length, rounds, device),
        "mamba_layer_forward_milliseconds": round(1000 * mamba_loop(length, device), 1),
    }
    write_results("longhorn_scan", figures, device)


if __name__ == "__main__":
    main()
