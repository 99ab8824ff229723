"""What a remembered launch depends on, with a stand-in for Triton, so that it is tested where there is none."""

import sys

from tests import processes

STAND_IN = """
import sys, types
import torch

triton, runtime, helpers = (types.ModuleType(name) for name in ("triton", "triton.runtime", "helpers"))
hook = types.SimpleNamespace(calls=[])
triton.knobs = types.SimpleNamespace(runtime=types.SimpleNamespace(launch_enter_hook=hook))
stream = lambda device: device
runtime.driver = types.SimpleNamespace(active=types.SimpleNamespace(get_current_stream=stream))
triton.runtime = runtime
helpers.INTERPRETING = types.SimpleNamespace(value=False)
sys.modules |= {"triton": triton, "triton.runtime": runtime, "hf_hybrid_ssm.ops.core.triton_helpers": helpers}
from hf_hybrid_ssm.ops.core.triton_launch import Launcher

launched, compiled = [], []

class Kernel:
    arg_names = ("x", "y", "n", "m", "WIDE", "SILU")

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **constants):
            compiled.append(constants)
            program = types.SimpleNamespace(function=len(compiled), packed_metadata=None)
            program.run = lambda *given: launched.append(given)
            return program
        return compile_and_run

def at(bytes, dtype=torch.float32):
    memory = torch.zeros(64, dtype=dtype)
    assert memory.data_ptr() % 16 == 0
    return memory[bytes // memory.element_size() :][:8]

usual = {"programs": 2, "tensors": (at(0), at(0)), "numbers": (8, 1)}
usual["constants"] = {"WIDE": True, "SILU": False, "num_warps": 4}
others = {
    "an address": {"tensors": (at(4), at(0))},
    "another address": {"tensors": (at(0), at(4))},
    "a dtype": {"tensors": (at(0, torch.float64), at(0))},
    "no tensor": {"tensors": (at(0), None)},
    "a number": {"numbers": (8, 2)},
    "a flag": {"constants": usual["constants"] | {"SILU": True}},
    "flags in turn": {"constants": usual["constants"] | {"WIDE": False, "SILU": True}},
    "an option of the compiler": {"constants": usual["constants"] | {"num_warps": 8}},
}
launch = Launcher(Kernel())
for count, change in enumerate([{}, *others.values()], 1):
    arguments = usual | change
    launch(**arguments)
    assert len(compiled) == count, change
    launch(**arguments | {"programs": 5})  # only the grid is another
    constants = arguments["constants"]
    assert len(compiled) == count and launched[-1][0] == 5 and launched[-1][4] == count, change
    following = constants["WIDE"], constants["SILU"]
    assert launched[-1][9:] == (*arguments["tensors"], *arguments["numbers"], *following), change
hook.calls.append(print)
launch(**usual)
assert len(compiled) == count + 1  # a profiler sees each
print(count)
"""


def test_whatever_tells_programs_apart_is_remembered_with_them():
    told = processes.run([sys.executable, "-c", STAND_IN])
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == ["9"]
