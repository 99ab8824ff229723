"""`bash tools/card.sh`, rehearsed on a CPU: every part runs, is recorded, and goes on after a kill."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import types
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu import child
from benchmarks.gpu.__main__ import arguments_of, main
from benchmarks.gpu.plan import PARTS
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.store import Store
from hf_hybrid_ssm.doctor import every_op

ROOT = Path(__file__).parents[1]
CARDS_MACHINE = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0", "safetensors": "0.8.0"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What travels of the source tree, and packages of the versions that such a machine says it has."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("src", "benchmarks", "recipes"):
        left_out = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / folder, root / folder, ignore=left_out)
    (root / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "card.sh", root / "tools")
    for name, version in CARDS_MACHINE.items():
        folder = root / "versions" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return root


def rehearse(tree, out):
    """The one command, and nothing installed but for what this Python and PYTHONPATH have, as on a card's machine."""
    paths = [str(tree / "versions"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHON": sys.executable}
    command = ["bash", tree / "tools" / "card.sh", "--device", "cpu", "--rehearse", "--seconds", "1500"]
    environment = os.environ | environment | {"OUT": str(out)}
    done = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(1800)
def test_every_part(tree, tmp_path):
    """All parts in one call; a fresh machine that has their results finds everything done."""
    said = rehearse(tree, tmp_path / "out")
    assert not (tree / "checkpoints").exists()
    page = (tmp_path / "out/gpu.md").read_text(encoding="utf-8")
    found = json.loads((tmp_path / "out/gpu.json").read_text(encoding="utf-8"))["parts"]
    assert list(found) == list(PARTS) and all(found.values())
    for case in (case for cases in found.values() for case in cases.values()):
        assert case["measured"].items() >= {"device": "cpu", "rehearsal": True}.items()
    assert "nothing here is a measurement" in page and "torch 2.11.0, transformers 5.17.0" in page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    counts = {row[0]: row[2:4] for row in rows if row[0] in PARTS}
    assert list(counts) == list(PARTS) and set(map(tuple, counts.values())) == {("0", "0")}
    shutil.rmtree(tree / "runs" / "card_rehearsal")
    (tree / "build" / "card_rehearsal").mkdir(parents=True)
    shutil.copy(tmp_path / "out/gpu.json", tree / "build" / "card_rehearsal")
    again = rehearse(tree, tmp_path / "again")
    assert said.count(": ok (") == int(re.search(r"(\d+) cases come from", again)[1]) and ": ok (" not in again
    assert json.loads((tmp_path / "again/gpu.json").read_text(encoding="utf-8"))["parts"] == found


@pytest.fixture
def part(monkeypatch):
    """A part with a case that fails between two that do not, and a log of what ran."""
    ran = []

    def case(name, result):
        def run():
            ran.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        return name, run

    module = types.ModuleType("benchmarks.gpu.peaks")
    results = {"first": {"ms": 1}, "broken": ValueError("too\nbad"), "last": {"ms": 3}}
    module.cases = lambda settings: [case(name, result) for name, result in results.items()]
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.peaks", module)
    for name in [name for name in PARTS if name != "peaks"]:
        monkeypatch.delitem(PARTS, name)
    return ran, results


def run(store, until=None, chosen=""):
    return child.run_cases(Settings("cpu", True), store, until or time.time() + 60, re.compile(chosen))


def figures(store, case):
    """Without when and of what they were measured."""
    return {
        name: value for name, value in store.cases("peaks")[case].items() if name not in ("measured", "wall_seconds")
    }


def test_a_failed_case_is_recorded_and_the_others_run(part, tmp_path):
    ran, _ = part
    store = Store(tmp_path, {"device": "cpu"})
    assert run(store) == child.DONE
    assert ran == ["first", "broken", "last"]
    cases = store.cases("peaks")
    assert cases["broken"]["error"] == "ValueError: too" and cases["last"]["ms"] == 3
    assert run(store) == child.DONE and len(ran) == 3


def test_a_killed_case_is_recorded_and_not_run_again(part, tmp_path):
    ran, _ = part
    store = Store(tmp_path, {"device": "cpu"})
    store.begin("peaks", "first")
    assert store.record_killed("its process ended with status -9") == "peaks: first"
    assert store.record_killed("again") is None
    assert run(store) == child.DONE and ran == ["broken", "last"]
    assert figures(store, "first") == {"error": "its process ended with status -9", "killed": True}


def test_a_poisoned_gpu_ends_the_process(part, tmp_path):
    ran, results = part
    results["broken"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    store = Store(tmp_path, {"device": "cpu"})
    assert run(store) == child.FATAL
    assert run(store) == child.DONE and ran == ["first", "broken", "last"]


def test_no_case_begins_after_the_end_of_the_time(part, tmp_path):
    ran, _ = part
    assert run(Store(tmp_path, {"device": "cpu"}), until=time.time() - 1) == child.OUT_OF_TIME
    assert ran == []


def test_results_of_another_card_and_of_other_sources_are_taken_anew(part, tmp_path, monkeypatch):
    ran, _ = part
    run(Store(tmp_path, {"device": "one"}))
    monkeypatch.setattr("benchmarks.gpu.store.digest", lambda part: "new")
    run(Store(tmp_path, {"device": "one"}))
    assert ran == 2 * ["first", "broken", "last"]
    other = Store(tmp_path, {"device": "other"})
    assert other.cases("peaks") == {}
    run(other)
    assert len(ran) == 9


@pytest.mark.parametrize(
    ("chosen", "status"), [("", 1), ("broken", 1), ("^peaks: (first|last)$", 0), ("nothing has such a name", 2)]
)
def test_the_status_says_whether_a_case_that_was_asked_for_failed(part, tmp_path, monkeypatch, chosen, status):
    assert status_of(tmp_path, monkeypatch, chosen) == status
    assert part[0] == [name for name in ("first", "broken", "last") if re.search(chosen, f"peaks: {name}")]


def test_the_status_says_that_cases_have_not_run(part, tmp_path, monkeypatch):
    assert status_of(tmp_path, monkeypatch, "", "--seconds", "0") == 3


def status_of(folder, monkeypatch, chosen, *options):
    """Of the command, whose cases run in this process, which has the parts of the test."""

    def watch(arguments, until, mark):
        store = Store(arguments.results, {"device": "cpu", "rehearsal": True})
        return run(store, until=until, chosen=arguments.cases.pattern)

    monkeypatch.setattr(driver, "watch", watch)
    monkeypatch.setattr(driver, "BEGIN", time.time())
    monkeypatch.setattr(driver, "ROOT", folder)
    words = f"gpu --device cpu --rehearse --out {folder} --cases".split()
    monkeypatch.setattr(sys, "argv", [*words, chosen, *options])
    return main()


def test_the_copy_outlives_a_kill_and_is_taken_up(part, tmp_path):
    """It is whole after every case; what was recorded since then is not overwritten."""
    ran, _ = part
    store = Store(tmp_path / "old", {"device": "one"}, tmp_path / "out")
    store.record("peaks", "first", {"ms": 1})
    store.begin("peaks", "broken")
    fresh = Store(tmp_path / "new", {"device": "one"})
    fresh.record("peaks", "last", {"ms": 7})
    copy = tmp_path / "out" / "gpu.json"
    assert fresh.resume(copy) == 1 and fresh.resume(copy) == 0
    assert run(fresh) == child.DONE and ran == ["broken"]
    assert figures(fresh, "last") == {"ms": 7}
    assert Store(tmp_path / "other", {"device": "other"}).resume(copy) == 0


def test_every_op_with_a_kernel_for_cards_is_checked():
    """By its self-check in each dtype, and against float64."""
    for part in ("doctor", "parity"):
        module = importlib.import_module(f"benchmarks.gpu.{part}")
        named = {case.split(" ")[0] for case, _ in module.cases(Settings("cuda", False))}
        assert named >= {name for name, op in every_op().items() if "triton" in op.kernels}


@pytest.fixture
def stuck(part, tmp_path, monkeypatch):
    """A process of the cases that gets stuck in the first one, and the next time finds all done; → a call of it."""
    store = Store(tmp_path / "results", {"device": "cpu", "rehearsal": True})
    stub, once = tmp_path / "python", tmp_path / "once"
    mark = json.dumps({"part": "peaks", "case": "first"})
    lines = ["#!/bin/bash", f"[ -e {once} ] && exit 0", f"echo '{mark}' > {store.running}; touch {once}", "sleep 60"]
    stub.write_text("\n".join(lines))
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    arguments = arguments_of(["--device", "cpu", "--rehearse", "--out", str(tmp_path / "out")])

    def call(seconds):
        begin = time.time()
        code = driver.run_to_the_end(arguments, store, begin + seconds)
        assert time.time() - begin < 30
        return code, store.cases("peaks")

    return call


def test_a_case_that_hangs_is_ended_and_recorded(stuck, monkeypatch):
    monkeypatch.setattr(driver, "LONGEST_CASE", 0.05)
    code, cases = stuck(20)
    assert code == child.DONE
    assert cases["first"]["killed"] and cases["first"]["wall_seconds"] >= 0.5


def test_the_end_of_the_time_is_not_a_case_s_fault(stuck):
    assert stuck(1) == (child.OUT_OF_TIME, {})


def test_programs_made_ahead_are_unpacked_for_this_user_alone(tree, tmp_path):
    def card(cache):
        command = ["bash", tree / "tools" / "card.sh", "--help"]
        environment = os.environ | {"PYTHON": sys.executable, "CACHE": str(cache)}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    (tmp_path / "kernel.cubin").write_text("code")
    archive = tree / "build" / "card" / "triton.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "kernel.cubin", "A/kernel.cubin")
    assert card(tmp_path / "new").returncode == 0
    assert (tmp_path / "new/A/kernel.cubin").read_text() == "code" and (tmp_path / "new").stat().st_mode & 0o77 == 0
    (tmp_path / "link").symlink_to(tmp_path)
    refused = card(tmp_path / "link")
    archive.unlink()
    assert refused.returncode == 2 and "is not this user's folder" in refused.stderr
