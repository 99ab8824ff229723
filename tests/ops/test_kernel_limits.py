"""What the compiler made of every launch, for cards that are not here, as it is on record. Needs no Triton.

`python -m benchmarks.kernel_limits` makes the record. How many registers went to memory and back in inner loops is
listed by kernel and class: a launch with more of them, or one more launch that has any, is found out.
"""

import json
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest

from tools.triton_versions import VERSIONS

ROOT = Path(__file__).parents[2]
RECORDS = json.loads((ROOT / "reports" / "kernel_limits.json").read_text(encoding="utf-8"))
LAUNCHES = defaultdict(list)
for record in RECORDS:
    name = ("triton", "sm", "op", "class", "dtype", "aligned")
    LAUNCHES[tuple(record[part] for part in name)].append(record)
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes
MANY = ("N=128", "N=256")  # states; of fewer, `test_kernel_evidence` has what is launched with aligned rows
# a kernel whose largest tiles a card may refuse, and what is launched in their place
SMALLER = {"chunk_backward_kernel": ("chunk_backward_kernel", "backward_kernel"), "finish_kernel": ("finish_kernel",)}
# kernel, class and dtype: registers that go to memory and back in inner loops, at most; all others none
SPILLS = {
    ("chunk_backward_kernel", "N=128", "bfloat16"): 160,
    ("chunk_backward_kernel", "N=256", "bfloat16"): 340,
    ("backward_kernel", "N=128", "float32"): 100,
    ("backward_kernel", "N=256", "float32"): 120,
    ("backward_kernel", "N=256", "bfloat16"): 120,
    ("backward_summary_kernel", "N=128", "bfloat16"): 1,
    ("finish_kernel", "N=256", "float32"): 42,
    ("finish_kernel", "N=256", "bfloat16"): 10,
}


def test_every_scan_of_many_states_is_on_record():
    """Of the oldest version of Triton that is admitted, for each generation of cards."""
    named = {(sm, shape, dtype, aligned) for triton, sm, op, shape, dtype, aligned in LAUNCHES
             if triton == VERSIONS[0] and op == "longhorn_scan"}  # fmt: skip
    assert named >= set(product(SHARED, MANY, ("bfloat16", "float32"), (True, False)))


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: "-".join(map(str, launch)))
def test_a_launch_finds_room(launch):
    programs = LAUNCHES[launch]
    fitting = {program["kernel"] for program in programs if program["fits"]}
    assert {program["launch"] for program in programs} == {"launched"}
    for program in programs:
        assert program["fits"] == (program["shared"] <= SHARED[program["sm"]])
        assert program["fits"] or fitting & set(SMALLER[program["kernel"]]), program


def test_inner_loops_spill_no_more_than_is_listed():
    worst = defaultdict(int)
    for program in RECORDS:
        if program["fits"]:
            name = (program["kernel"], program["class"], program["dtype"])
            worst[name] = max(worst[name], program["spills in inner loops"])
    assert {name: most for name, most in worst.items() if most > SPILLS.get(name, 0)} == {}
    assert set(SPILLS) == {name for name, most in worst.items() if most}
