"""How many kernels are compiled anew over 27 lengths, by op: prints JSON. Nothing is compiled and nothing runs.

Triton is given a driver without a card, so that the package's own launches decide what they would compile. In a
process of its own: the driver is the process's.
"""

import json
from collections import Counter

import torch
import triton.runtime
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.core.dispatch import REGISTRY
from hf_hybrid_ssm.ops.implicit_attention import implicit_attention
from hf_hybrid_ssm.ops.implicit_attention import triton as attention_launches
from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition, lti_scan
from hf_hybrid_ssm.ops.long_conv import long_conv
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan
from hf_hybrid_ssm.ops.longhorn_scan import triton as scan_launches

LENGTHS = (
    1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 100, 127, 128, 129, 144, 255, 256, 257, 300, 512, 1000, 1024,
    2048,
)  # fmt: skip
compiled: Counter[str] = Counter()


class Program:
    """What a launch finds where a compiled program would be."""

    function, packed_metadata = 1, ()

    def run(self, *arguments) -> None:
        pass

    def launch_metadata(self, *arguments) -> None:
        pass


class Driver:
    """Of a card that is not there; what Triton asks before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def note(kernel: JITFunction, key: str, *rest) -> Program:
    compiled[kernel.fn.__name__] += 1
    kernel.device_caches[0][0][key] = program = Program()
    return program


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
    triton.runtime.driver.set_active(Driver())
    JITFunction._do_compile = note
    for module in (scan_launches, attention_launches):
        module.multiprocessors = lambda device: 132
    for op in REGISTRY.values():
        if "triton" in op.kernels:
            op._load("triton")
            op.select = lambda device, dtype, backend=None, op=op: op._loaded["triton"]
    found = {}
    for name, (run, lengths) in OPS.items():
        compiled.clear()
        for length in lengths:
            run(length).sum().backward()
        found[name] = dict(compiled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
