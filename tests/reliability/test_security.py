"""The package executes nothing it was not shipped with.

ruff holds most of it: `S` and the banned modules in pyproject.toml; here is what no rule of ruff says.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_hybrid_ssm

PACKAGE = Path(hf_hybrid_ssm.__file__).parent
ROOT = Path(__file__).parents[2]
SOURCES = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "recipes").rglob("*.py"))
UNSAFE = [
    "import pickle\n",
    "from urllib import request\n",
    "import http.client\n",
    "import subprocess\n",
    "import multiprocessing\n",
    "eval('1')\n",
    "exec('1')\n",
    "import os\n\nos.system('ls')\n",
    "from os import system\n\nsystem('ls')\n",
    "import yaml\n\nyaml.load('x', yaml.Loader)\n",
    "import torch as t\n\nt.hub.load('a', 'b')\n",
    "from torch.utils.cpp_extension import load\n\nload('x', [])\n",
]


def findings(*arguments: str, source: str | None = None) -> str:
    """What ruff's rules of security say."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", "-q"]
    command += [
        "--config",
        str(ROOT / "pyproject.toml"),
        "--select",
        "S,TID251",
        "--ignore",
        "S101,S311,S603",
        *arguments,
    ]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("source", UNSAFE)
def test_ruff_finds(source):
    assert findings("--stdin-filename", "src/any.py", "-", source=source)


def test_sources_are_safe():
    assert findings(str(PACKAGE), str(ROOT / "recipes")) == ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-3:]))
def test_torch_load_takes_weights_alone(path):
    for call in re.findall(r"torch\.load\(.*", path.read_text(encoding="utf-8")):
        assert "weights_only=True" in call


def test_only_this_packages_sources_are_compiled():
    """`compile_and_load` is given files beside the module that calls it, and they are part of the package."""
    compiled = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "compile_and_load":
                assert ast.unparse(node.args[0]) == "Path(__file__).with_name('native.c')"
                assert (path.parent / "native.c").is_file()
                compiled.append(path)
    assert compiled
