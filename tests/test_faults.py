"""The tools that ask what tests notice: every fault can be made, every source has tests, a sample comes out again."""

import ast
from pathlib import Path

import pytest

from tools import faulty_copy
from tools.faults import FAULTS, Fault
from tools.faulty_copy import FaultyCopy
from tools.mutants import mutants_of
from tools.mutation import drawn, population
from tools.parts import PARTS, SCOPES, files_in, relevant_tests

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_every_fault_made_by_hand_can_be_made(fault):
    start, text = fault.place(ROOT), (ROOT / fault.file).read_text(encoding="utf-8")
    if fault.file.endswith(".py"):
        ast.parse(text[:start] + fault.new + text[start + len(fault.old) :])
    for test in fault.tests.split():
        path, _, name = test.partition("::")
        assert (ROOT / path).exists()
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_every_source_has_tests():
    for file in files_in(ROOT, "all"):
        assert relevant_tests(file), file
    for prefix, tests in PARTS.items():
        assert any((ROOT / "src").parent.glob(f"{prefix}*")), prefix
        assert not [test for test in tests if not (ROOT / test).exists()], prefix
    assert set(files_in(ROOT, "ops")) < set(files_in(ROOT, "src")) < set(files_in(ROOT, "all"))
    assert not [file for file in files_in(ROOT, "ops") if "triton" in file] and "all" in SCOPES


SOURCE = '''"""Text 1."""
def area(width: int = 2, height=3.0, *, flip: bool = True) -> int:
    """Of 2 by 3."""
    if width <= 0 or not height:
        raise ValueError(f"width={width} must be at least {1}.")
    total = max(width * height, -height)
    log(total, width, level=1)
    return scale(total, by=2,  flip=flip) if flip else total % 7
'''
CHANGED = {
    "width <= 0": "width < 0", "<= 0": "<= 1", "0 or not": "0 and not", "or not height": "or  height",
    '        raise ValueError(f"width={width} must be at least {1}.")': "        pass",
    "width * height": "width / height", "-height)": "height)", "max(": "min(",
    "max(width * height, -height)": "max(-height, width * height)",
    "log(total, width": "log(width, total", "level=1": "level=2", "width, level=1)": "width, )",
    "    log(total, width, level=1)": "    pass",
    "total % 7": "total // 7", "% 7": "% 8", "by=2,": "", "by=2": "by=3", "flip=flip)": ")",
    "if flip": "if (not flip)", "= 2,": "= 3,", "=3.0": "=6.001", "= True": "= False",
}  # fmt: skip


def test_mutants_are_what_a_tired_person_might_write():
    found = mutants_of("area.py", SOURCE)
    texts = {SOURCE[: mutant.start] + mutant.new + SOURCE[mutant.end :] for mutant in found}
    wanted = {SOURCE.replace(old, new, 1) for old, new in CHANGED.items()}
    assert texts == wanted and len(found) == len(texts)
    for text in texts:
        ast.parse(text)


def test_a_sample_is_of_the_faults_alone(tmp_path):
    """What is added to a file changes no other choice: a sample loses at most as many as come in."""
    longer = SOURCE + "\n\ndef other(x):\n    return x + 1\n"
    before, after = (mutants_of("area.py", source) for source in (SOURCE, longer))
    chosen = [{mutant.name for mutant in drawn(mutants, 10, seed=3)} for mutants in (before, before, after)]
    assert chosen[0] == chosen[1] and len(chosen[0] & chosen[2]) >= 8
    assert {mutant.name for mutant in drawn(before, 10, seed=4)} != chosen[0]
    assert len({mutant.name for mutant in population(ROOT, "src/hf_hybrid_ssm/upcycle/")}) > 100


def test_a_copy_says_which_faults_its_tests_notice(tmp_path, monkeypatch):
    """In a repository of one file. What fails without a fault says nothing about faults."""
    monkeypatch.setattr(faulty_copy, "preload", lambda: None)
    root = tmp_path / "repository"
    for name, text in {
        "src/area.py": "def area(a, b):\n    return a * b\n",
        "tests/test_area.py": "from area import area\n\ndef test_area():\n    assert area(2, 2) == 4\n",
        "tests/test_broken.py": "def test_broken():\n    assert False\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    copy = FaultyCopy(root, tmp_path, limit_s=60)
    for old, new, noticed in (("a * b", "a - b", True), ("a * b", "a + b", False)):
        fault = Fault("src/area.py", "tests/test_area.py", old, new)
        start = fault.place(root)
        assert copy.notices(fault.file, start, start + len(old), new, fault.tests.split()) == noticed
    assert (copy.root / "src/area.py").read_text() == (root / "src/area.py").read_text()
    with pytest.raises(RuntimeError, match="fail without a fault"):
        copy.notices("src/area.py", 0, 0, "", ["tests/test_broken.py"])
    with pytest.raises(RuntimeError, match="no test is found in no file"):
        copy.notices("src/area.py", 0, 0, "", [])
    with pytest.raises(ValueError, match="'b' 2 times, not once"):
        Fault("src/area.py", "", "b", "").place(root)
