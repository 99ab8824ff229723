"""`bash tools/card.sh`, rehearsed on a CPU: every part runs, is recorded, and goes on after a kill."""

import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu import peaks, results
from benchmarks.gpu.plan import PARTS
from benchmarks.gpu.settings import Settings
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
    found = json.loads((tmp_path / "out/gpu.json").read_text(encoding="utf-8"))["cases"]
    assert list(dict.fromkeys(name.partition(":")[0] for name in found)) == list(PARTS)
    for case in found.values():
        assert case["measured"].items() >= {"device": "cpu", "rehearsal": True}.items()
    assert "nothing here is a measurement" in page and "torch 2.11.0, transformers 5.17.0" in page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    counts = {row[0]: row[2:4] for row in rows if row[0] in PARTS}
    assert list(counts) == list(PARTS) and set(map(tuple, counts.values())) == {("0", "0")}
    shutil.rmtree(tree / "runs" / "card_rehearsal")
    (tree / "build" / "card_rehearsal").mkdir(parents=True)
    shutil.copy(tmp_path / "out/gpu.json", tree / "build" / "card_rehearsal")
    again = rehearse(tree, tmp_path / "again")
    assert said.count(": ok (") == len(found) and ": ok (" not in again
    assert (tmp_path / "again/gpu.md").read_text(encoding="utf-8") == page


CASES = {
    "first": lambda: {"ms": 1},
    "broken": lambda: {"ms": [][0]},
    "killed": lambda: os._exit(9),
    "hangs": lambda: time.sleep(60),
    "poisons": lambda: exec("raise RuntimeError('CUDA error: an illegal memory access was encountered')"),
    "last": lambda: {"ms": 3},
}
WRONG = {
    "broken": "IndexError: list index out of range",
    "killed": "its process ended with status 9",
    "hangs": "took more than 2.0 seconds",
    "poisons": "RuntimeError: CUDA error: an illegal memory access was encountered",
}


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """→ a call of the command with one part of six cases: its status, the cases that ran, and what is on record."""
    for name in [name for name in PARTS if name != "peaks"]:
        monkeypatch.delitem(PARTS, name)
    monkeypatch.setattr(peaks, "cases", lambda settings: CASES.items())
    monkeypatch.setattr(driver, "PROCESSES", multiprocessing.get_context("fork"))  # which has these cases too
    monkeypatch.setattr(driver, "LONGEST_CASE", 0.2)
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    for name in ("HF_HUB_OFFLINE", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "1")

    def run(chosen, *options):
        monkeypatch.setattr(driver, "BEGIN", time.time())
        words = f"gpu --device cpu --rehearse --out {tmp_path}/out --cases".split()
        monkeypatch.setattr(sys, "argv", [*words, chosen, *options])
        status, file = driver.main(), tmp_path / "out" / "gpu.json"
        ran = [line.split(": ")[1] for line in capfd.readouterr().out.splitlines() if line.startswith("peaks: ")]
        found = json.loads(file.read_text())["cases"] if file.is_file() else {}
        return status, ran, {name.removeprefix("peaks: "): case for name, case in found.items()}

    return run


def test_whatever_a_case_does_the_others_run_and_none_runs_again(command, tmp_path):
    status, ran, found = command("")
    assert status == 1 and ran == list(found) == list(CASES)
    assert {name: case["error"] for name, case in found.items() if "error" in case} == WRONG
    assert [name for name, case in found.items() if "killed" in case] == ["killed", "hangs"]
    assert found["last"]["ms"] == 3 and found["hangs"]["wall_seconds"] >= 2
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "| peaks | 6 | 4 | 0 |" in page and all(f"- {name}: `{error}`" in page for name, error in WRONG.items())
    assert command("") == (1, [], found)


@pytest.mark.parametrize(
    ("chosen", "status"), [("broken", 1), ("^peaks: (first|last)$", 0), ("nothing has such a name", 2)]
)
def test_the_status_is_that_of_the_cases_that_were_asked_for(command, chosen, status):
    found = command(chosen)
    assert found[:2] == (status, {0: ["first", "last"], 1: ["broken"], 2: []}[status])
    assert command("first")[0] == 0


def test_the_end_of_the_time_is_not_a_case_s_fault(command):
    assert command("", "--seconds", "0") == (3, [], {})
    status, ran, _ = command("first|hangs", "--seconds", str(driver.AT_THE_END + 1))
    assert (status, ran) == (3, ["first"])


def test_results_of_another_card_and_of_other_sources_are_taken_anew(command, tmp_path, monkeypatch):
    """Of a machine that was given back the copy counts."""
    assert command("first")[1] == ["first"]
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "build").mkdir()
    (tmp_path / "out").rename(tmp_path / "build" / "card_rehearsal")
    assert command("first")[1] == []
    shutil.rmtree(tmp_path / "build")
    file = tmp_path / "runs" / "card_rehearsal" / "gpu.json"
    file.write_text(file.read_text().replace('"device": "cpu"', '"device": "another card"'))
    assert command("first")[1] == ["first"]
    monkeypatch.setattr(results, "digest", lambda part: "of other sources")
    assert command("first")[1] == ["first"]


def test_every_op_with_a_kernel_for_cards_is_checked():
    """By its self-check in each dtype, and against float64."""
    for part in ("doctor", "parity"):
        module = importlib.import_module(f"benchmarks.gpu.{part}")
        named = {case.split(" ")[0] for case, _ in module.cases(Settings("cuda", False))}
        assert named >= {name for name, op in every_op().items() if "triton" in op.kernels}


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
