"""What compilers make of the Triton kernels for cards that are not here: shared memory, spills in inner loops, and
products that 32 bits cannot hold.

Where Triton is installed a launch of every op is compiled; with HF_HYBRID_SSM_THOROUGH for three generations of cards
and 16 to 256 states (an hour and a half of a processor). `python -m tests.reporting triton` takes every version.
"""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ops.kernel_launches import STATES as ALL_STATES
from tests.reporting import THOROUGH

ROOT = Path(__file__).parents[2]
LAUNCHERS = sorted((ROOT / "src" / "hf_hybrid_ssm" / "ops").rglob("triton*.py"))
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes
STATES = [str(number) for number in (ALL_STATES if THOROUGH else (16, 32))]  # of 32 some go in chunks
# a kernel whose largest tiles a card may refuse, and what is launched in their place
SMALLER = {"chunk_backward_kernel": ("chunk_backward_kernel", "backward_kernel"), "finish_kernel": ("finish_kernel",)}
# kernel, class and dtype: registers that go to memory and back in inner loops, at most; all others none
SPILLS = {
    ("attention_gradient_kernel", "q=220, q'=22", "bfloat16"): 3,
    ("attention_gradient_kernel", "q=220, q'=22", "float32"): 82,
    ("attention_gradient_kernel", "q=50, q'=5", "float32"): 35,
    ("backward_kernel", "K=4", "bfloat16"): 1,
    ("backward_summary_kernel", "N=256", "bfloat16"): 2,
    ("channel_backward_kernel", "N=256, complex", "float32"): 4,
    ("channel_backward_kernel", "N=256, real", "float32"): 2,
    ("channel_derivative_kernel", "N=256, complex", "float32"): 90,
    ("channel_derivative_kernel", "N=256, real", "float32"): 22,
    ("chunk_backward_kernel", "N=128", "bfloat16"): 171,
    ("chunk_backward_kernel", "N=256", "bfloat16"): 290,
    ("chunk_backward_kernel", "N=32", "bfloat16"): 139,
    ("chunk_backward_kernel", "N=64", "bfloat16"): 347,
    ("finish_kernel", "N=256", "bfloat16"): 12,
    ("finish_kernel", "N=256", "float32"): 42,
    ("forward_kernel", "N=16", "bfloat16"): 1,
    ("forward_kernel", "N=256", "bfloat16"): 1,
    ("forward_kernel", "N=32", "bfloat16"): 179,
    ("forward_kernel", "N=64", "bfloat16"): 145,
    ("toeplitz_kernel", "", "float32"): 293,
}


@pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton: `python -m tests.reporting triton` has every one"
)
@pytest.mark.timeout(7200 if THOROUGH else 900)
@pytest.mark.parametrize("capability", SHARED if THOROUGH else [90])
def test_launches_find_room_and_inner_loops_spill_no_more_than_is_listed(capability):
    """In a process of its own, which has one driver."""
    command = [sys.executable, "-m", "tests.ops.kernel_launches", str(capability), *STATES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    programs = [json.loads(line) for line in done.stdout.splitlines()]
    launched, worst = defaultdict(set), defaultdict(int)
    for program in programs:
        if program["shared"] <= SHARED[capability]:
            launched[program["op"], program["class"], program["dtype"], program["aligned"]].add(program["kernel"])
            name = (program["kernel"], program["class"], program["dtype"])
            worst[name] = max(worst[name], program["spills"])
    assert len({program["op"] for program in programs}) == 8
    for program in programs:
        if program["shared"] > SHARED[capability]:  # gave way to smaller tiles, or to tokens
            here = launched[program["op"], program["class"], program["dtype"], program["aligned"]]
            assert here & set(SMALLER[program["kernel"]]), program
    assert {name: most for name, most in worst.items() if most > SPILLS.get(name, 0)} == {}
    # the rows of a long convolution are short
    assert [program for program in programs if program["narrow"] and "long_conv" not in program["module"]] == []
    names = [f"hf_hybrid_ssm.ops.{file.parent.name}.{file.stem}" for file in LAUNCHERS if file.parent.name != "core"]
    kernels = {(module.__name__, name) for module in map(import_module, names) for name in kernels_of(module)}
    assert kernels and kernels == {(program["module"], program["kernel"]) for program in programs}


def kernels_of(module):
    """Names of the kernels of a module that are its own."""
    found = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    return [name for name, kernel in found.items() if kernel.fn.__module__ == module.__name__]


@pytest.mark.parametrize("file", LAUNCHERS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_launches_have_one_axis(file):
    """It takes 2^31 - 1 programs, the others 65,535: fewer than a long row has tiles, or a large batch rows."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    ids = [n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr in ("program_id", "num_programs")]
    assert all(ast.literal_eval(n.args[0]) == 0 for n in ids)
    launches = [n.func for n in calls if isinstance(n.func, ast.Subscript) and "kernel" in ast.unparse(n.func.value)]
    grids = [launch.slice for launch in launches]
    grids += [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and "grid" in ast.unparse(n.targets[0])]
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and "grid" in n.name]
    grids += [n.value for function in functions for n in ast.walk(function) if isinstance(n, ast.Return)]
    assert all(not isinstance(grid, ast.Tuple) or len(grid.elts) == 1 for grid in grids)
