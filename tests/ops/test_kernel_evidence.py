"""What the compilers said of the kernels, as the page records it, and how kernels are launched. Needs no Triton."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.kernel_evidence import add_shares, implicit_bytes, lane_bytes, of_first_pass, read_records, scan_bytes
from tools.triton_versions import VERSIONS

ROOT = Path(__file__).parents[2]
RECORDS = read_records()
add_shares(RECORDS)
SCANS = [r for r in RECORDS if r["op"] == "longhorn_scan" and "bandwidth" in r]
# instructions for a token and channel; the layout that Triton 3.6 once chose took thirty times as many
MOST = {("forward_kernel", 16): 130, ("forward_kernel", 32): 260, ("forward_kernel", 64): 520}
MOST |= {("backward_kernel", 16): 620, ("chunk_backward_kernel", 32): 1250, ("chunk_backward_kernel", 64): 1550}
LAUNCHED = [r for r in SCANS if (r["kernel"], int(r["class"][2:])) in MOST]
LAUNCHERS = sorted((ROOT / "src" / "hf_hybrid_ssm" / "ops").rglob("triton*.py"))


# kernel and class: registers that go to memory and back in inner loops, at most; all others none
SPILLS = {("toeplitz_kernel", "float32"): 90, ("chunk_backward_kernel", "N=32"): 90}
SPILLS |= {("chunk_backward_kernel", "N=64"): 260}
# not launched with so many states, where chunks take fewer instructions, but counted to be compared
SPILLS |= {("backward_kernel", f"N={states}"): 140 for states in (32, 64)}
# one version for one generation of cards
WORST = {("long_conv", "toeplitz_kernel", "float32", "3.8.0", 80): 170}


def test_every_version_has_every_kernel():
    found = {version: {_name(r) for r in RECORDS if r["triton"] == version} for version in VERSIONS}
    assert found[VERSIONS[0]] and {r["triton"] for r in RECORDS} == set(VERSIONS)
    for version in VERSIONS:
        assert found[version] == found[VERSIONS[0]], version


def _name(record):
    return record["op"], record["kernel"], record["class"], record["sm"]


def test_inner_loops_do_not_spill():
    assert RECORDS
    for record in RECORDS:
        name = (record["op"], record["kernel"], record["class"], record["triton"], record["sm"])
        allowed = WORST.get(name) or SPILLS.get((record["kernel"], record["class"]), 0)
        assert record["spills in inner loops"] <= allowed, name


@pytest.mark.parametrize("kernel, states", MOST)
def test_instructions_of_the_scan(kernel, states):
    found = [r for r in LAUNCHED if r["kernel"] == kernel and r["class"] == f"N={states}"]
    assert found
    for record in found:
        for shape in record["bandwidth"].values():
            assert shape["instructions per token and channel"] <= MOST[kernel, states]


def test_chunks_are_taken_where_they_take_fewer_instructions():
    """Of every version and card that has both counts."""
    fewest = {(r["kernel"], r["class"], r["triton"], r["sm"]): _instructions(r) for r in SCANS}
    both = [(key, ("chunk_" + key[0], *key[1:])) for key in fewest if ("chunk_" + key[0], *key[1:]) in fewest]
    assert {key[1] for key, _ in both} == {"N=32", "N=64"}
    for by_token, chunks in both:
        assert fewest[chunks] < {"N=32": 0.8, "N=64": 0.56}[chunks[1]] * fewest[by_token], chunks


@pytest.mark.parametrize("direction, share", [("forward", 0.7), ("backward", 0.45)])
def test_first_passes_in_chunks_take_fewer_instructions(direction, share):
    """Of every version, card and class that has both."""
    by_token, in_chunks = (
        {(r["class"], r["triton"], r["sm"]): of_first_pass(r) for r in RECORDS if r["kernel"] == name}
        for name in (f"{direction}_summary_kernel", f"{direction}_chunk_summary_kernel")
    )
    assert {key[0] for key in in_chunks} == {"N=32", "N=64"}
    for key, count in in_chunks.items():
        assert count < share * by_token[key], key


def _instructions(record):
    return max(shape["instructions per token and channel"] for shape in record["bandwidth"].values())


SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def test_programs_find_room_on_the_cards_they_are_for():
    """Bytes that a program shares; a backward in chunks that finds none gives way to smaller tiles, and to tokens."""
    found = [r for r in RECORDS if r["kernel"] != "chunk_backward_kernel"]
    assert found and all(r["shared"] <= SHARED[int(r["sm"])] for r in found)


def test_bytes_of_implicit_attention():
    """q = 50 and q' = 5: 88 rows of columns for 32 tokens, 15 rows for each token."""
    moved = implicit_bytes(50, 5)
    assert moved["now"] == 2 + 4 * 88 / 32 + 60 + 2 == 75
    assert moved["fused"] + moved["matrix"] < 16 < implicit_bytes(220, 22)["matrix"]


def test_bytes_of_the_scan():
    """Of the backward at N = 16 with T = 2 and 32 channels a tile."""
    sizes = {"S": 16, "P": 1, "T": 2, "BD": 32, "BLOCK": 64}
    moved = scan_bytes(sizes, backward=True)
    assert moved["least"] == 14 and moved["scratch"] == 64 and moved["parts of dk, dq"] == 8.25
    chunks = scan_bytes({"N": 64, "BD": 64, "BLOCK": 64}, backward=True, chunks=True)
    assert chunks["scratch"] == 8 * (16 + 6) and chunks["least"] == 14
    assert scan_bytes(sizes, backward=False) == {"least": 8, "checkpoints": 1, "keys and queries": 4}


def test_bytes_are_read_from_loads_and_stores():
    text = [
        "@P0 LDG.E.128 R4, [R2.64]",
        "STG.E.U16 [R2.64], R4",
        "LDGSTS.E.BYPASS.128 [R1], [R2.64]",
        "LDG.E R1, [R2]",
    ]
    assert lane_bytes([*text, "LDS.128 R1, [R2]", "FFMA R1, R2, R3, R4"]) == 16 + 2 + 16 + 4


def test_versions_are_those_that_are_admitted():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floor = re.search(r">=([\d.]+)", project["optional-dependencies"]["gpu"][0])[1]
    assert VERSIONS[0].rsplit(".", 1)[0] == floor and list(VERSIONS) == sorted(VERSIONS)
    helpers = (ROOT / "src/hf_hybrid_ssm/ops/core/triton_helpers.py").read_text(encoding="utf-8")
    assert f"LOWEST = ({floor.replace('.', ', ')})" in helpers


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


def test_there_are_launches_to_look_at():
    texts = [file.read_text(encoding="utf-8") for file in LAUNCHERS]
    assert sum(len(re.findall(r"_kernel\[", text)) for text in texts) >= 12
