"""What the launches of steps hand to a compiled program, the first time by Triton and then as remembered: JSON.

Triton is given a driver without a card; nothing is compiled and nothing runs. In a process of its own: the driver is
the process's.
"""

import json
import sys
from collections.abc import Callable

import torch
import triton

from benchmarks import absent_card
from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.core.pages import PagedState
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

ROWS = Rows(is_step=True, overwrites_states=True, return_final_state=True)
D, N = 48, 16


def scan(
    batch: int = 1, dtype: torch.dtype = torch.float32, shift: int = 0, *, gate: bool = True, pages: bool = False
) -> Callable:
    wide = torch.zeros(batch, 1, 3 * D + 2 * N + shift, dtype=dtype)[..., shift:]
    x, logit, z, k, q = wide.split([D, D, D, N, N], -1)
    state = torch.zeros(batch, D, N)
    held = PagedState(torch.zeros(2 * batch, D, N), torch.arange(batch)) if pages else state
    skip, bias = torch.ones(D), torch.zeros(D)
    return lambda: longhorn_scan(
        x, logit, k, q, beta_bias=bias, D=skip, z=z if gate else None, rows=ROWS, initial_state=held
    )


def convolution(
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    shift: int = 0,
    *,
    taps: int = 4,
    activation: str | None = "silu",
) -> Callable:
    x = torch.zeros(batch, 1, D + shift, dtype=dtype)[..., shift:]
    weight, bias, state = (torch.zeros(shape, dtype=dtype) for shape in ((D, taps), (D,), (batch, taps - 1, D)))
    return lambda: causal_conv(x, weight, bias, activation=activation, rows=ROWS, initial_state=state)


CASES: dict[str, Callable] = {
    "a scan": scan(),
    "a scan of more rows": scan(3),
    "a scan in bfloat16": scan(dtype=torch.bfloat16),
    "a scan of unaligned rows": scan(shift=1),
    "a scan without a gate": scan(gate=False),
    "a scan on pages": scan(pages=True),
    "a convolution": convolution(),
    "a convolution of more rows": convolution(3),
    "a convolution in bfloat16": convolution(dtype=torch.bfloat16),
    "a convolution of unaligned rows": convolution(shift=1),
    "a convolution of two taps": convolution(taps=2),
    "a convolution without activation": convolution(activation=None),  # which constants alone tell apart
}


def main() -> None:
    absent_card.install(90, compiles=False)
    launched: list[tuple] = []
    absent_card.NOTHING.run = lambda *arguments: launched.append(arguments)
    bound = 0

    def watch(frame, event, argument):
        nonlocal bound
        bound += event == "call" and frame.f_code is triton.JITFunction.run.__code__

    def binds(run: Callable) -> int:
        nonlocal bound
        bound = 0
        sys.setprofile(watch)
        run()
        sys.setprofile(None)
        return bound

    found = {}
    for name, run in CASES.items():
        times = [binds(run), binds(run)]
        first, again = launched[-2:]
        # the last pointer is the output, another each time; what follows are hooks and metadata of a profiler
        same = [a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(first, again)]
        differ = [i for i, equal in enumerate(same) if not equal]
        found[name] = {"binds": times, "as many": len(first) == len(again), "differ": differ}
        found[name]["kinds"] = sorted({type(first[i]).__name__ for i in differ})
    triton.knobs.runtime.launch_enter_hook.add(print)
    found["watched by a profiler"] = {"binds": [0, binds(CASES["a scan"])]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
