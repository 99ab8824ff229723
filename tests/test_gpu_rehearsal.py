"""What `make gpu` does on a card, rehearsed on a CPU: every part runs, is recorded, and goes on after a kill."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import types
from pathlib import Path

import pytest

from benchmarks.gpu import child, parts, requirements, syncs
from benchmarks.gpu.__main__ import LONGEST_CASE, age, arguments_of, last_start, main
from benchmarks.gpu.families import FAMILIES, small
from benchmarks.gpu.parts import ABOUT, PARTS, about, digest
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.store import Store
from hf_hybrid_ssm.doctor import every_op
from tests import processes
from tests.host_syncs import host_syncs

ROOT = Path(__file__).parents[1]


CARDS_MACHINE = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0", "safetensors": "0.8.0"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What `make gpu` needs of the source tree, and packages of the versions that such a machine says it has."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("src", "benchmarks", "recipes"):
        left_out = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / folder, root / folder, ignore=left_out)
    shutil.copy(ROOT / "Makefile", root)
    for name, version in CARDS_MACHINE.items():
        folder = root / "versions" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return root


ARGUMENTS = "--device cpu --rehearse --results {} --minutes 25 --limit 60"


def environment_of(tree):
    """Nothing installed but for what this Python and PYTHONPATH have, as on a card's machine."""
    paths = [str(tree / "versions"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def rehearse(tree, results, *variables):
    """`make gpu`."""
    command = ["make", "gpu", f"GPU_PYTHON={sys.executable}", f"GPU_ARGS={ARGUMENTS.format(results)}", *variables]
    done = subprocess.run(command, cwd=tree, env=environment_of(tree), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(1800)
def test_every_part(tree, tmp_path):
    """All parts, one process after the other; a fresh machine that has the archive finds everything done."""
    first, out, second = tmp_path / "first", tmp_path / "out", tmp_path / "second"
    said = rehearse(tree, first, f"GPU_OUT={out}")
    assert " 0 failed; " in said
    assert not (tree / "checkpoints").exists()
    with tarfile.open(out / "gpu.tar.gz") as tar:
        names = tar.getnames()
        page = tar.extractfile("gpu.md").read().decode()
        for part in PARTS:
            found = json.loads(tar.extractfile(f"gpu_{part}.json").read())
            assert found["cases"] and found["superseded"] == []
            for case in found["cases"].values():
                assert case["measured"].items() >= {"device": "cpu", "rehearsal": True}.items()
    assert sorted(names) == sorted([f"gpu_{part}.json" for part in PARTS] + ["gpu.md"])
    assert "nothing here is a measurement" in page and "torch 2.11.0, transformers 5.17.0" in page
    assert all(f"| {part.replace('_', ' ')} |" in page for part in PARTS)
    command = [sys.executable, "-m", "benchmarks.gpu", *ARGUMENTS.format(second).split()]
    environment = environment_of(tree)
    environment["PYTHONPATH"] += f"{os.pathsep}{tree / 'src'}"
    done = processes.run([*command, "--resume", out / "gpu.tar.gz"], cwd=tree, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = done.stdout
    assert " 0 failed; " in said and ": ok (" not in said
    assert (second / "gpu_training.json").read_bytes() == (first / "gpu_training.json").read_bytes()


def test_an_archive_is_handed_on():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", "gpu", "GPU_OUT=new", "GPU_FROM=old/gpu.tar.gz"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert '--out "new" --resume "old/gpu.tar.gz"' in said


def test_the_report_is_of_a_card():
    page = ROOT / "reports" / "gpu.md"
    assert not page.exists() or "nothing here is a measurement" not in page.read_text(encoding="utf-8")


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
    return ran, results


def run(store, until=None, chosen=""):
    return child.run_cases(Settings("cpu", True), store, ["peaks"], until or time.time() + 60, re.compile(chosen))


def figures(store, case):
    """Without when and of what they were measured."""
    return {name: value for name, value in store.cases("peaks")[case].items() if name != "measured"}


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


def test_no_case_begins_after_the_end_of_a_slice(part, tmp_path):
    ran, _ = part
    assert run(Store(tmp_path, {"device": "cpu"}), until=time.time() - 1) == child.OUT_OF_TIME
    assert ran == []


def test_no_case_begins_after_the_command_was_killed(part, tmp_path, monkeypatch):
    ran, _ = part
    parents = iter([1, 1, 2])
    monkeypatch.setattr(child.os, "getppid", lambda: next(parents))
    assert run(Store(tmp_path, {"device": "cpu"})) == child.OUT_OF_TIME
    assert ran == ["first"]


def test_results_of_another_card_are_not_taken_and_not_lost(part, tmp_path):
    ran, _ = part
    run(Store(tmp_path, {"device": "one"}))
    other = Store(tmp_path, {"device": "other"})
    assert other.cases("peaks") == {} and len(other.superseded("peaks")) == 3
    run(other)
    assert len(ran) == 6 and len(other.cases("peaks")) == 3
    assert {old["measured"]["device"] for old in other.superseded("peaks")} == {"one"}


def test_only_what_a_change_is_about_is_run_again(part, tmp_path):
    """And what was measured of the sources before stays on record."""
    ran, _ = part
    sources = dict.fromkeys(("first", "broken", "last"), "old")
    store = Store(tmp_path, {"device": "one"}, tmp_path / "out" / "gpu.tar.gz", lambda part, case: sources[case])
    run(store)
    sources["last"] = "new"
    run(store)
    assert ran == ["first", "broken", "last", "last"]
    assert [(old["case"], old["measured"]["sources"]) for old in store.superseded("peaks")] == [("last", "old")]
    fresh = Store(tmp_path / "new", {"device": "one"}, sources=lambda part, case: sources[case])
    assert fresh.resume(store.archive) == 3 and fresh.superseded("peaks") == store.superseded("peaks")


def test_an_archive_brings_what_was_superseded_once(part, tmp_path):
    """Into a folder that has results of its own, and where some sources changed in between."""
    run(Store(tmp_path / "old", {"device": "one"}, tmp_path / "out" / "gpu.tar.gz", lambda *_: "old"))
    here = Store(tmp_path / "new", {"device": "one"}, sources=lambda *_: "new")
    here.record("peaks", "last", {"ms": 7})
    for _ in range(2):
        assert here.resume(tmp_path / "out" / "gpu.tar.gz") == 0
    assert figures(here, "last") == {"ms": 7} and list(here.cases("peaks")) == ["last"]
    assert sorted(old["case"] for old in here.superseded("peaks")) == ["broken", "first", "last"]


def test_cases_are_chosen_by_name(part, tmp_path):
    ran, _ = part
    store = Store(tmp_path, {"device": "one"})
    assert run(store, chosen="^(first|last)$") == child.DONE and ran == ["first", "last"]


def test_what_is_run_again_is_kept(part, tmp_path):
    ran, _ = part
    store = Store(tmp_path, {"device": "one"})
    run(store)
    store.set_aside("peaks", ["last"])
    run(store)
    assert ran[-1] == "last" and len(ran) == 4 and [old["case"] for old in store.superseded("peaks")] == ["last"]


@pytest.mark.parametrize(("chosen", "status"), [("", 1), ("broken", 1), ("first", 0), ("nothing has such a name", 2)])
def test_the_status_says_whether_a_case_that_was_asked_for_failed(part, tmp_path, monkeypatch, chosen, status):
    def watch(arguments, parts, until, mark):  # in this process, which has the parts of the test
        return run(Store(tmp_path, {"device": "cpu", "rehearsal": True}), chosen=arguments.cases.pattern)

    monkeypatch.setattr("benchmarks.gpu.__main__.watch", watch)
    monkeypatch.setattr("benchmarks.gpu.report.TABLES", {})  # which show other figures
    options = f"--device cpu --rehearse --results {tmp_path} --parts peaks --cases".split()
    monkeypatch.setattr(sys, "argv", ["gpu", *options, chosen])
    assert main() == status


def test_the_archive_outlives_a_kill_and_is_taken_up(part, tmp_path):
    """It is whole after every case; what was recorded since then is not overwritten."""
    ran, _ = part
    store = Store(tmp_path / "old", {"device": "one"}, archive=tmp_path / "out" / "gpu.tar.gz")
    store.record("peaks", "first", {"ms": 1})
    store.begin("peaks", "broken")
    fresh = Store(tmp_path / "new", {"device": "one"})
    fresh.record("peaks", "last", {"ms": 7})
    assert fresh.resume(store.archive) == 1 and fresh.resume(store.archive) == 0
    assert run(fresh) == child.DONE and ran == ["broken"]
    assert figures(fresh, "last") == {"ms": 7}
    assert Store(tmp_path / "other", {"device": "other"}).resume(store.archive) == 0


def test_every_case_is_about_sources_that_there_are():
    assert list(ABOUT) == list(PARTS)
    package = ROOT / "src" / "hf_hybrid_ssm" / "ops"
    for op in every_op():
        folder = package / parts.FOLDERS.get(op, op)
        assert folder.is_dir() and {folder, package / "core"} < set(about("doctor", f"{op} float32"))
    for part in PARTS:
        assert all(path.exists() for path in about(part, "a case"))


def test_every_op_with_a_kernel_for_cards_is_checked():
    """By its self-check in each dtype, and against float64."""
    for part in ("doctor", "parity"):
        module = importlib.import_module(f"benchmarks.gpu.{part}")
        named = {case.split(" ")[0] for case, _ in module.cases(Settings("cuda", False))}
        assert named >= {name for name, op in every_op().items() if "triton" in op.kernels}


@pytest.mark.parametrize("settings", [Settings("cuda", False), Settings("cpu", True)], ids=["card", "rehearsal"])
def test_no_case_has_the_name_of_another(settings):
    for part in PARTS:
        cases = [case for case, _ in importlib.import_module(f"benchmarks.gpu.{part}").cases(settings)]
        assert cases and len(set(cases)) == len(cases)


def test_the_sources_of_a_case_identify_its_results(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    for folder in ("benchmarks/gpu", "src/hf_hybrid_ssm/ops/longhorn_scan", "src/hf_hybrid_ssm/ops/causal_conv"):
        (tmp_path / folder).mkdir(parents=True)

    def digests():
        parts._digest.cache_clear()
        return [digest("parity", case) for case in ("longhorn_step 1", "causal_conv 1")] + [digest("scan", "1")]

    for name in (
        *(f"benchmarks/{name}" for name in parts.SHARED),
        "benchmarks/gpu/parity.py",
        "benchmarks/gpu/scan.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    before = digests()
    (tmp_path / "src/hf_hybrid_ssm/ops/longhorn_scan/triton.py").write_text("new")
    assert [old == new for old, new in zip(before, digests())] == [False, True, False]
    (tmp_path / "benchmarks/gpu/scan.py").write_text("new")
    assert [old == new for old, new in zip(before, digests())] == [False, True, False]
    (tmp_path / "benchmarks/gpu/settings.py").write_text("new")
    assert all(old != new for old, new in zip(before, digests()))
    parts._digest.cache_clear()


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_wait_for_a_card_where_that_is_known(name, monkeypatch):
    """What the part `syncs` will find on one, of the same inputs and without kernels."""
    monkeypatch.setattr("hf_hybrid_ssm.ops.core.dispatch._ENVIRONMENT_BACKEND", "torch")
    settings = Settings("cpu", True)
    model = small(name, settings).train()
    inputs = syncs.inputs_of("packed", settings, model.config.vocab_size)
    reads = host_syncs(lambda: model(**inputs, use_cache=False).loss.backward())
    assert bool(reads) == (f"{name} training packed" in syncs.WAITS), reads


def test_a_case_that_is_to_wait_fails_if_it_does_not():
    card = Settings("cuda", False)

    def waits():
        raise RuntimeError("called a synchronizing CUDA operation")

    def breaks():
        raise RuntimeError("something else")

    assert syncs.expected("a reason", waits, card) == {"waits": "a reason"}
    assert "does not" in syncs.expected("a reason", dict, card)["error"]
    assert syncs.expected(None, dict, card) == {}
    with pytest.raises(RuntimeError, match="something else"):
        syncs.expected("a reason", breaks, card)
    with pytest.raises(RuntimeError, match="synchronizing"):
        syncs.expected(None, waits, card)


def test_the_mark_of_a_case_may_go_at_any_time(tmp_path, monkeypatch):
    """The process of the cases removes it while its parent asks how old it is."""
    mark = tmp_path / "mark"
    mark.write_text("{}")
    os.utime(mark, (time.time() - 900,) * 2)
    assert 900 <= age(mark) < 1000
    mark.unlink()
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    assert age(mark) == 0


def test_no_case_starts_that_cannot_end():
    assert last_start(1000.0, 5, 10) == 1300
    assert last_start(1000.0, 8, 10) + LONGEST_CASE < 1600
    assert last_start(1000.0, 25, 60) == 2500
    assert last_start(1000.0, 6, 8, 90) == 1360 and last_start(1000.0, 9, 8, 90) == 1360
    assert arguments_of([]).minutes == 5 and arguments_of([]).limit == 10


@pytest.mark.parametrize(
    "arguments, says",
    [(["--limit", "4"], "take 270 seconds"), (["--resume", "x"], "no such file"), (["--cases", "("], "no regular")],
)
def test_what_cannot_be_is_refused(arguments, says, capsys):
    with pytest.raises(SystemExit):
        arguments_of(arguments)
    assert says in capsys.readouterr().err


@pytest.fixture
def versions(monkeypatch):
    found = {}

    def version(name):
        if name not in found:
            raise requirements.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(requirements, "version", version)
    return found


def test_everything_that_is_missing_is_named_at_once(versions):
    versions |= {"torch": "2.7.1+cu128", "transformers": "5.15.1", "triton": "3.5.1"}
    assert requirements.problems("cuda") == [
        "torch 2.7.1+cu128 is too old: pip install 'torch>=2.8'",
        "transformers 5.15.1 is too old: pip install 'transformers>=5.16'",
        "safetensors >= 0.8 is missing: pip install 'safetensors>=0.8'",
        "triton 3.5.1 is too old: pip install 'triton>=3.6'",
    ]


def test_a_cards_machine_has_what_is_needed(versions, monkeypatch):
    versions |= CARDS_MACHINE
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert requirements.problems("cuda") == []


def test_nothing_is_needed_that_is_not_named():
    """Of what transformers does without, too: scipy is neither named nor taken."""
    named = {*requirements.REQUIRED, *requirements.ON_CUDA}
    modules = [f"benchmarks.gpu.{name}" for name in ("__main__", "report", "child", "one_scan", *PARTS)]
    script = (
        "import importlib, sys\n"
        "absent = {'scipy', 'sklearn', 'datasets', 'matplotlib', 'pandas'}\n"
        "sys.modules |= dict.fromkeys(absent | {name for name in sys.modules if name.split('.')[0] in absent})\n"
        f"for name in {modules}: importlib.import_module(name)\n"
    )
    assert "scipy" not in named
    done = processes.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}/src"})
    assert done.returncode == 0, done.stderr[-2000:]


def test_floors_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    floors = {re.match(r"[\w-]+", line)[0]: re.search(r">=([\d.]+)", line)[1] for line in lines}
    for name, floor in (requirements.REQUIRED | requirements.ON_CUDA).items():
        assert name == "torch" or floors[name] == floor  # FlexAttention's gradients need a newer torch


def test_a_cpu_only_rehearses(capsys):
    with pytest.raises(SystemExit):
        arguments_of(["--device", "cpu"])
    assert "needs --rehearse" in capsys.readouterr().err
