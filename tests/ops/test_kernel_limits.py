"""What the compiler made of every launch, for cards that are not here, as it is on record. Needs no Triton.

`python -m tools.triton_versions --limits` makes the record, and goes on with it. How many registers went to memory
and back in inner loops is listed by kernel, class and dtype: a launch with more of them is found out.
"""

from collections import defaultdict
from itertools import product

import pytest

from benchmarks import launch_record
from benchmarks.kernel_limits import CAPABILITIES, DTYPES, Inputs, launches
from tools.triton_versions import VERSIONS

RECORD = launch_record.read()
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes
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


def every_launch():
    """Of each version that is admitted and each generation of cards: op, class, dtype, whether rows are aligned."""
    for version, sm, dtype, aligned in product(VERSIONS, CAPABILITIES, DTYPES, (True, False)):
        for op, shape_class, _ in launches(Inputs(DTYPES[dtype], aligned=aligned)):
            yield version, sm, op, shape_class, dtype, aligned


def test_the_record_has_no_launch_that_is_not_made():
    assert set(RECORD) <= set(every_launch())


def test_every_launch_is_on_record():
    """For each version that is admitted and each generation of cards, of the kernels as they are."""
    assert set(every_launch()) <= set(RECORD), "python -m tools.triton_versions --limits compiles what is lacking"
    assert {
        name[2] for name, launch in RECORD.items() if launch["source"] != launch_record.source_of(name[2])
    } == set()


def test_a_record_is_read_as_it_was_written(tmp_path, monkeypatch):
    """Also a launch that found no room; one of other kernels takes the place of what is on record of them."""
    monkeypatch.setattr(launch_record, "FILE", tmp_path / "record.json")
    programs = [["b_kernel", 3, 64, 9, 0], ["a_kernel", 1, 2**18, 5, 1]]
    first = dict(zip(launch_record.NAME, ("3.6.0", 90, "an_op", "N=2", "float32", True)))
    first |= {"source": "1", "launch": launch_record.LAUNCHED, "programs": programs}
    second = first | {"sm": 80, "launch": "no room", "programs": programs[1:]}
    for launch in (first, second):
        launch_record.add(launch)
    assert sorted(launch_record.read().values(), key=str) == sorted([first, second], key=str)
    launch_record.add(second | {"source": "2"})
    assert list(launch_record.read().values()) == [second | {"source": "2"}]


@pytest.mark.parametrize("name", RECORD, ids=lambda name: "-".join(map(str, name)))
def test_a_launch_finds_room(name):
    programs = list(launch_record.programs([RECORD[name]]))
    fitting = {program["kernel"] for program in programs if program["fits"]}
    assert RECORD[name]["launch"] == launch_record.LAUNCHED and programs
    for program in programs:
        assert program["fits"] == (program["shared"] <= SHARED[program["sm"]])
        assert program["fits"] or fitting & set(SMALLER[program["kernel"]]), program


def test_inner_loops_spill_no_more_than_is_listed():
    worst = defaultdict(int)
    for program in launch_record.programs(RECORD.values()):
        if program["fits"]:
            name = (program["kernel"], program["class"], program["dtype"])
            worst[name] = max(worst[name], program["spills in inner loops"])
    assert {name: most for name, most in worst.items() if most > SPILLS.get(name, 0)} == {}
    assert set(SPILLS) == {name for name, most in worst.items() if most}


def test_a_digest_follows_kernels_and_nothing_else(tmp_path, monkeypatch):
    """Of an op's kernels and of the helpers that they call, but for comments and what only launches them."""
    folder, helpers = tmp_path / "an_op", tmp_path / "core" / "triton_helpers.py"
    folder.mkdir()
    helpers.parent.mkdir()
    monkeypatch.setattr(launch_record, "OPS", tmp_path)
    kernel = "@kernel\ndef a_kernel(x, B: tl.constexpr):\n    store(x, {})\n\n\ndef launch():\n    {}\n"
    helper = "@triton.jit\ndef store(x, y):\n    tl.store(x, {})\n\n\n@triton.jit\ndef other(x):\n    return {}\n"

    def digest(value="1", launched="pass", stored="y", unused="x"):
        (folder / "triton.py").write_text(kernel.format(value, launched), encoding="utf-8")
        helpers.write_text(helper.format(stored, unused), encoding="utf-8")
        launch_record.source_of.cache_clear()
        return launch_record.source_of("an_op")

    try:
        plain = digest()
        assert digest(launched="return 5") == plain == digest(value="1  # one\n    ") == digest(unused="x + 1")
        assert len({plain, digest(value="2"), digest(stored="y + y")}) == 3
    finally:
        launch_record.source_of.cache_clear()
