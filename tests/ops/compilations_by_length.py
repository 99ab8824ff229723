"""How many kernels are compiled anew over 27 lengths, by op, and which examples of self-checks are aligned: JSON.

Triton is given a driver without a card, so that the package's own launches decide what they would compile. Nothing is
compiled and nothing runs. In a process of its own: the driver is the process's.
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import absent_card
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.triton_helpers import VARYING
from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition
from tests.row_options import causal_conv, implicit_attention, long_conv, longhorn_scan, lti_scan

LENGTHS = (
    1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 100, 127, 128, 129, 144, 255, 256, 257, 300, 512, 1000, 1024,
    2048,
)  # fmt: skip


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def scan(length: int) -> torch.Tensor:
    x, logit, z = (tensor(2, length, 64) for _ in range(3))
    k, q = (tensor(2, length, 16) for _ in range(2))
    more = {"beta_bias": torch.zeros(64).requires_grad_(), "D": torch.ones(64).requires_grad_(), "z": z}
    return longhorn_scan(x, logit, k, q, **more)[0]


def scan_of_slices(length: int) -> torch.Tensor:
    """As a layer calls it."""
    x, z, logit, k, q = tensor(2, length, 3 * 64 + 2 * 16).split([64, 64, 64, 16, 16], -1)
    return longhorn_scan(x, logit, k, q, z=z)[0]


def convolution(length: int) -> torch.Tensor:
    return causal_conv(tensor(2, length, 64), tensor(64, 4), tensor(64), activation="silu")[0]


def long_convolution(length: int) -> torch.Tensor:
    return long_conv(tensor(2, length, 8, dtype=torch.float32), tensor(8, length, dtype=torch.float32))[0]


def attention(length: int) -> torch.Tensor:
    options = {"theta": 100.0, "scale": 0.1}
    return implicit_attention(tensor(2, length, 64), tensor(3, 5, 50), tensor(3, 5), tensor(5), tensor(1), **options)[
        0
    ]


def linear_scan(length: int) -> torch.Tensor:
    transition = Transition(torch.full((1, 16, 8, 2), 0.5, dtype=torch.float64).requires_grad_(), "complex")
    system = ChannelSystem(transition, tensor(1, 16, 16, dtype=torch.float32), tensor(1, 16, 16, dtype=torch.float32))
    return lti_scan(tensor(2, length, 16, dtype=torch.float32), system)[0]


OPS = {
    "scan": (scan, LENGTHS),
    "scan of slices": (scan_of_slices, LENGTHS),
    "convolution": (convolution, LENGTHS),
    "long convolution": (long_convolution, [length for length in LENGTHS if 16 < length <= 512]),  # its own range
    "implicit attention": (attention, [length for length in LENGTHS if length > 2]),
    "linear scan": (linear_scan, LENGTHS),
}


def main() -> None:
    asked = absent_card.install(90, compiles=False)
    found: dict[str, dict] = {"compiled": {}, "examples": {}}
    for name, (run, lengths) in OPS.items():
        asked.clear()
        for length in lengths:
            run(length).sum().backward()
        found["compiled"][name] = Counter(each.kernel.fn.__name__ for each in asked)
    for name, op in absent_card.ops_with_kernels().items():
        found["examples"][name] = [alignments(op, example, asked) for example in op.examples]
    print(json.dumps(found))


def alignments(op: Op, example: Callable[[], Any], asked: list) -> dict[str, bool]:
    """By kernel, whether the compiler knows of all that an example gives it that it is a multiple of 16."""
    absent_card.forget()
    asked.clear()
    absent_card.launch_example(op, example(), torch.float32)
    return {each.kernel.fn.__name__: is_aligned(each) for each in asked}


def is_aligned(asked: absent_card.Specialisation) -> bool:
    places = [(place,) for place, (name, what) in enumerate(asked.signature.items())
              if what != "constexpr" and name not in VARYING]  # fmt: skip
    return all(asked.attributes.get(place) for place in places)


if __name__ == "__main__":
    main()
