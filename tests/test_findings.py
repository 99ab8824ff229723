"""The scripts of findings/ stand alone: pinned packages, a folder of their own, nothing of this package; each has its
line on the page. They are run by hand."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "findings"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="a source distribution has no findings")


def test_every_script_stands_alone():
    scripts = sorted(FOLDER.glob("*.sh"))
    assert len(scripts) >= 10
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        assert os.access(path, os.X_OK), path.name
        assert "\nset -euo pipefail\n" in text and "$(mktemp -d)" in text and "trap 'rm -rf" in text, path.name
        (packages,) = re.findall(r"pip\" install (.*?)\ncd ", text, re.DOTALL)
        pins = re.findall(r"'([^']*)'", packages)
        assert pins and all(re.fullmatch(r"[a-z]+==[\d.]+", pin) for pin in pins), path.name
        assert not re.search(r"hf.hybrid.ssm", text), path.name
        assert "assert" in text and re.search(r'print\(f?"expected', text) and "seen" in text, path.name


def test_the_page_has_a_line_for_every_script():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[`(\S+)`\]", page, re.MULTILINE) == sorted(path.name for path in FOLDER.glob("*.sh"))
    assert all(f"({name})" in page for name in (path.name for path in FOLDER.glob("*.sh")))
