"""The package executes nothing it was not shipped with.

ruff holds most of it: `S` and the banned modules in pyproject.toml; here is what no rule of ruff says.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import hf_hybrid_ssm

PACKAGE = Path(hf_hybrid_ssm.__file__).parent
ROOT = Path(__file__).parents[2]
SOURCES = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "recipes").rglob("*.py"))
RUFF = f"ruff check --no-cache --output-format concise -q --config {ROOT / 'pyproject.toml'} --select S,TID251"


def findings(*arguments: str, source: str | None = None) -> str:
    """What ruff's rules of security say."""
    command = [sys.executable, "-m", *RUFF.split(), "--ignore", "S101,S311,S603", *arguments]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stdout


def test_sources_are_safe():
    """`torch.load` takes weights alone, and only C files beside the module that asks for them are compiled."""
    assert findings(str(PACKAGE), str(ROOT / "recipes")) == ""
    compiled = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not [call for call in re.findall(r"torch\.load\(.*", text) if "weights_only=True" not in call], path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "compile_and_load":
                assert path.name == "native_library.py"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "library_beside":
                assert ast.unparse(node.args[0]) == "__file__"
                assert path.with_suffix(".c").is_file()
                compiled.append(path)
    assert compiled
