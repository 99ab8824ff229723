"""What do the C kernels take on each instruction set of x86, and what does torch, held to the same one?

One thread, float32, one row; forward without gradients, and forward with backward. Each instruction set is measured in
a process of its own (HF_HYBRID_SSM_CPU for the kernels; ATEN_CPU_CAPABILITY, MKL_ENABLE_INSTRUCTIONS and
ONEDNN_MAX_CPU_ISA for torch), native and torch in turn; the shortest of several runs counts. What the processor does
not have is not measured.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from timing import machine_arguments, seconds_of, write_results

from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.core import instruction_sets
from hf_hybrid_ssm.ops.implicit_attention import implicit_attention
from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition, diagonal_scan, lti_scan
from hf_hybrid_ssm.ops.local_attention import local_attention
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

TORCH = {
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
Run = Callable[[str], torch.Tensor]
LONGEST = 1.0  # seconds that the rounds of one candidate may take


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def longhorn() -> tuple[Run, list[torch.Tensor]]:
    """1,024 tokens, 768 channels, 16 states, with gate and skip."""
    leaves = [draw(1, 1024, 768, seed=seed) for seed in range(3)] + [draw(1, 1024, 16, seed=seed) for seed in (3, 4)]
    x, logit, z, k, q = leaves
    skip = draw(768)
    return lambda backend: longhorn_scan(x, logit, k, q, z=z, D=skip, backend=backend)[0], [*leaves, skip]


def convolution() -> tuple[Run, list[torch.Tensor]]:
    """1,024 tokens, 768 channels, four taps and SiLU."""
    x, weight, bias = draw(1, 1024, 768), draw(768, 4), draw(768)
    return lambda backend: causal_conv(x, weight, bias, activation="silu", backend=backend)[0], [x, weight, bias]


def _decay(*shape: int) -> torch.Tensor:
    size, angle = torch.sigmoid(3 + 2 * draw(*shape).detach()), 3 * draw(*shape, seed=1).detach()
    return torch.view_as_real(torch.polar(size, angle).to(torch.complex128))


def scan() -> tuple[Run, list[torch.Tensor]]:
    """1,024 tokens of 256 channels with 16 complex states each (S4D)."""
    decay, vector, output = _decay(1, 256, 16).requires_grad_(), draw(1, 256, 32), draw(1, 256, 32, seed=1)
    system, u = ChannelSystem(Transition(decay, "complex"), vector, output), draw(1, 1024, 256, seed=2)
    return lambda backend: lti_scan(u, system, backend=backend)[0], [u, decay, vector, output]


def states() -> tuple[Run, list[torch.Tensor]]:
    """1,024 tokens of 384 complex states (S5)."""
    decay, x = _decay(384).requires_grad_(), draw(1, 1024, 384, 2)

    def run(backend: str) -> torch.Tensor:
        a, inputs = torch.view_as_complex(decay), torch.view_as_complex(x)
        return torch.view_as_real(diagonal_scan(a, inputs, backend=backend)[0])

    return run, [x, decay]


def window() -> tuple[Run, list[torch.Tensor]]:
    """1,024 tokens, 8 heads of 64, a window of 128 with a bias by distance."""
    leaves = [draw(1, 8, 1024, 64, seed=seed) for seed in range(3)] + [draw(8, 128)]
    q, k, v, bias = leaves
    return lambda backend: local_attention(q, k, v, window=(127, 0), bias=bias, backend=backend)[0], leaves


def implicit() -> tuple[Run, list[torch.Tensor]]:
    """256 tokens, 256 channels, a memory of order 64 over 256 tokens reduced to 10 rows (LMU-ISA)."""
    x, weight, bias, collapse = draw(1, 256, 256), draw(3, 10, 64), draw(3, 10), draw(10)
    options = {"theta": 256.0, "scale": 256**-0.5}
    leaves = [x, weight, bias, collapse]
    return lambda backend: implicit_attention(x, weight, bias, collapse, **options, backend=backend)[0], leaves


CASES = {case.__name__: case for case in (longhorn, convolution, scan, states, window, implicit)}


def forward(run: Run, backend: str) -> None:
    with torch.no_grad():
        run(backend)


def both(run: Run, leaves: list[torch.Tensor], backend: str) -> None:
    torch.autograd.grad(run(backend).sum(), leaves)


def shortest(candidates: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, in turn; a slow one has fewer rounds."""
    found = {name: [seconds_of(run) for _ in range(2)][1:] for name, run in candidates.items()}
    for _ in range(rounds):
        for name, run in candidates.items():
            if sum(found[name]) < LONGEST:
                found[name].append(seconds_of(run))
    return {name: round(1000 * min(times), 3) for name, times in found.items()}


def measured(names: list[str], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """case → "forward" or "forward and backward" → backend → milliseconds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        run, leaves = CASES[name]()
        kinds = {"forward": partial(forward, run), "forward and backward": partial(both, run, leaves)}
        found[name] = {
            kind: shortest({backend: partial(call, backend) for backend in ("native", "torch")}, rounds)
            for kind, call in kinds.items()
        }
    return found


def held_to(level: str, names: list[str], rounds: int) -> dict | None:
    """The same in a process that has no more than this instruction set; None if the processor does not have it."""
    if level not in instruction_sets.available():
        return None
    environment = os.environ | TORCH[level] | {instruction_sets.VARIABLE: level, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--inside", "--rounds", str(rounds), *names]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is written")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = machine_arguments(parser, threads=1)
    if arguments.device != "cpu":
        sys.exit("These are the kernels of the CPU.")
    names = arguments.names or list(CASES)
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"{unknown} are not among {list(CASES)}")
    rounds = 2 if arguments.quick else arguments.rounds
    if arguments.inside:
        print(json.dumps(measured(names, rounds)))
        return
    figures = {
        "sizes": {name: CASES[name].__doc__ for name in names},
        "milliseconds": {level: held_to(level, names, rounds) for level in instruction_sets.LEVELS},
    }
    write_results("cpu_kernels", figures)


if __name__ == "__main__":
    main()
