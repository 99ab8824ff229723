"""The Triton kernels, run by Triton's interpreter where there is no card, and compiled for cards that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REASON = "needs Triton: `python -m tests.reporting triton` takes every version"
triton = pytest.importorskip("triton", minversion="3.6", reason=REASON)


@pytest.mark.parametrize("cases", ["triton_cases.py", "implicit_attention_cases.py", "test_linear_scan_kernels.py"])
def test_kernels_agree_with_the_reference(cases):
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    file = str(Path(__file__).with_name(cases))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.fixture(scope="module")
def specialised():
    script = Path(__file__).with_name("compilations_by_length.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_self_checks_take_the_code_that_models_take(specialised):
    """Of every kernel that an op's examples launch, one is compiled for rows that are aligned and one for others."""
    for op, examples in specialised["examples"].items():
        assert all(examples)
        for kernel in {kernel for example in examples for kernel in example}:
            found = {example[kernel] for example in examples if kernel in example}
            assert found == {True, False}, (op, kernel)


def test_a_new_length_compiles_little_anew(specialised):
    """A large kernel takes seconds to compile. Of 27 lengths each kernel needs two at most: where a
    row begins at a multiple of 16 bytes, and where it does not."""
    found = specialised["compiled"]
    assert all(found.values()) and max(count for kernels in found.values() for count in kernels.values()) <= 3
    assert {name: sum(kernels.values()) for name, kernels in found.items()} == {
        "scan": 10,
        "scan of slices": 6,
        "convolution": 2,
        "long convolution": 2,
        "implicit attention": 4,
        "linear scan": 3,
    }


def test_a_launch_that_is_remembered_gets_what_triton_gives():
    """Steps are launched without Triton's binding of arguments once it is known which program they come to."""
    done = subprocess.run([sys.executable, "-m", "tests.ops.launches_again"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("watched by a profiler") == {"binds": [0, 1]}
    more_rows = {"a scan of more rows", "a convolution of more rows"}  # only the grid is another
    assert len(found) == 12 and more_rows < set(found)
    for name, launch in found.items():
        assert launch["binds"] == ([0, 0] if name in more_rows else [1, 0]), name
        assert launch["as many"]
        assert len(set(launch["differ"]) - {6, 7, 8}) == 1, name  # hooks and metadata for a profiler, and the output
        assert set(launch["kinds"]) <= {"Tensor", "HookChain", "NoneType"}


def test_amd_is_refused_before_its_compiler_meets_assembly(monkeypatch):
    from hf_hybrid_ssm.ops.core.triton_helpers import supports

    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "ROCm" in supports("cuda", torch.float32)
    monkeypatch.setattr(torch.version, "hip", None)
    assert supports("cuda", torch.float32) is None


def test_sizes_that_find_no_room_give_way_to_smaller_ones_and_are_not_tried_again():
    from triton.runtime.errors import OutOfResources

    from hf_hybrid_ssm.ops.core.triton_helpers import first_that_fits
    from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes

    tried = []

    def launch(size):
        tried.append(size)
        if size > 10:
            raise OutOfResources(size, 10, "shared memory")
        return size

    assert first_that_fits(("test", 1), (30, 20, 10, 5), launch) == 10
    assert first_that_fits(("test", 1), (30, 20, 10, 5), launch) == 10 and tried == [30, 20, 10, 10]
    with pytest.raises(OutOfResources):
        first_that_fits(("test", 2), (30, 20), launch)
    sizes = triton_sizes.tile_sizes(256, backward=True)
    attempts = triton_sizes.by_shared_memory(sizes, triton_sizes.chunk_sizes(256, "torch.bfloat16"), backward=True)
    assert [chunks and chunks["BD"] for _, chunks in attempts] == [32, 16, None, None]
    assert [common["STAGES"] for common, _ in attempts[2:]] == [2, 1]


def test_versions_that_nobody_compiled_with_are_refused(monkeypatch):
    from hf_hybrid_ssm.ops.core import triton_helpers

    monkeypatch.setattr(triton_helpers, "VERSION", (3, 5))
    assert "pip install 'triton>=3.6'" in triton_helpers.supports("cuda", torch.float32)


def test_sizes_measured_on_a_card_are_used(tmp_path, monkeypatch):
    from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes

    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path))
    sizes = {"BD": 64, "T": 4, "S": 8, "num_warps": 4, "STAGES": 2}
    name = triton_sizes.shape_class(8 * 1536, 2048, 16, "torch.bfloat16", backward=False)
    triton_sizes.tuned_path("A card").write_text(json.dumps({"sizes": {name: sizes}}), encoding="utf-8")
    triton_sizes.tuned.cache_clear()
    shape = {"rows": 8 * 1536, "length": 2048, "dtype": "torch.bfloat16"}
    found = triton_sizes.tile_sizes(16, backward=False, **shape, device="A card")
    assert found.items() >= sizes.items() and found["P"] == 2
    assert triton_sizes.tile_sizes(16, backward=False, **shape, device="Another")["BD"] == 32
    triton_sizes.tuned_path("A card").write_text("{", encoding="utf-8")
    triton_sizes.tuned.cache_clear()
    assert triton_sizes.tile_sizes(16, backward=False, **shape, device="A card")["BD"] == 32
    triton_sizes.tuned.cache_clear()


def test_a_block_measured_on_a_card_is_used_forward_and_backward(tmp_path, monkeypatch):
    """Of any length and batch, for the shape of the checkpoints must be known of symbolic ones too."""
    from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes

    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path))
    name = triton_sizes.block_class(32, "torch.bfloat16")
    triton_sizes.tuned_path("A card").write_text(json.dumps({"sizes": {name: {"BLOCK": 16}}}), encoding="utf-8")
    triton_sizes.tuned.cache_clear()
    for device, block in (("A card", 16), ("Another", 64)):
        options = {"dtype": "torch.bfloat16", "device": device}
        assert triton_sizes.block_tokens(20, **options) == block
        assert triton_sizes.chunk_sizes(32, **options)["BLOCK"] == block
        for backward in (False, True):
            assert triton_sizes.tile_sizes(32, backward=backward, **options)["BLOCK"] == block
    assert triton_sizes.block_tokens(32, "torch.float32", "A card") == 64
    triton_sizes.tuned.cache_clear()


def test_every_part_of_a_tuning_is_measured_and_kept(tmp_path, monkeypatch):
    """Without a card: the second block is the fastest, and one of the sizes does not run."""
    from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes, triton_tune

    def run(inputs, backward):
        measured = {key: value for sizes in triton_sizes.MEASURING.values() for key, value in sizes.items()}
        if measured.get("T") == 16:
            raise RuntimeError("no room")
        return (torch.ones(1),)

    def milliseconds(inputs, backward):
        blocks = [sizes["BLOCK"] for sizes in triton_sizes.MEASURING.values() if "BLOCK" in sizes]
        return float(blocks != [32])

    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "A card")
    for name, replacement in {"_inputs": lambda *_: [], "_run": run, "_milliseconds": milliseconds}.items():
        monkeypatch.setattr(triton_tune, name, replacement)
    found = triton_tune.tune(8, 2048, 1536, 16, torch.bfloat16)
    classes = [triton_sizes.shape_class(8 * 1536, 2048, 16, "torch.bfloat16", backward=b) for b in (False, True)]
    assert list(found) == [*classes, triton_sizes.block_class(16, "torch.bfloat16")]
    assert list(found.values())[-1] == {"BLOCK": 32} and triton_sizes.MEASURING == {}
    assert triton_sizes.tuned("A card") == found
    triton_sizes.tuned.cache_clear()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("states", [1, 16, 64])
def test_candidates_of_tuning(states, backward):
    """The table's first, none twice, each of them sizes that the kernels take."""
    from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes, triton_tune

    found = list(triton_tune.candidates(states, backward=backward))
    table = triton_sizes.tile_sizes(states, backward=backward)
    assert found[0] == {name: table[name] for name in triton_sizes.NAMES}
    assert len({tuple(sizes.values()) for sizes in found}) == len(found) > 4
    for sizes in found:
        assert sizes["BD"] % triton_sizes.WIDTH == 0 and triton_sizes.BLOCK % sizes["T"] == 0
        assert not backward or 2 * sizes["T"] <= 16 <= sizes["BD"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card to tune on")
def test_tuning_without_a_card_is_refused():
    from hf_hybrid_ssm.ops.longhorn_scan import triton_tune

    with pytest.raises(RuntimeError, match="there is none"):
        triton_tune.tune(1, 64, 32, 16, torch.bfloat16)


def test_rows_are_cut_only_where_a_card_would_idle():
    from hf_hybrid_ssm.ops.longhorn_scan.triton_sizes import time_splits

    assert time_splits(8 * 48 * 32, 2048, 132) == 1  # B=8, D=1536: most schedulers have a warp
    assert time_splits(48 * 32, 65536, 132) == 22  # B=1: two warps for each
    assert time_splits(48 * 32, 300, 132) == 1  # too short
    assert time_splits(8 * 48 * 32, 2048, 132, backward=True) == 2
    assert time_splits(11 * 48 * 32, 2048, 132, backward=True) == 1  # a warp for each


def test_rows_of_few_numbers_are_cut_into_four_or_more():
    from hf_hybrid_ssm.ops.linear_scan.diagonal_splits import diagonal_splits

    assert diagonal_splits(2, 65536, 132) == 256  # 64 numbers of one row: a split has 256 tokens
    assert diagonal_splits(32, 65536, 132) == 33  # 1,024 of one: two warps for each scheduler
    assert diagonal_splits(32, 512, 132) == 1  # too short
    assert diagonal_splits(8 * 32, 65536, 132) == 4
    assert diagonal_splits(16 * 32, 65536, 132) == 1  # most schedulers have a warp
