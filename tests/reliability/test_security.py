"""The package executes nothing it was not shipped with: no pickle, no code from text, no shell, no network."""

import ast
from pathlib import Path

import pytest

from tests.reliability.security import PACKAGE, RECIPES, dotted, findings, sources

SOURCES = sources(PACKAGE) + sources(RECIPES)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-3:]))
def test_source_does_nothing_it_must_not(path):
    assert findings(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import _pickle as p",
        "from urllib import request",
        "import http.client",
        "import subprocess",
        "from subprocess import run",
        "import multiprocessing",
        "eval('1')",
        "exec('1')",
        "compile('1', 'x', 'eval')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch import load as fetch\nfetch('x')",
        "import torch as t\nt.load('x')",
        "import os\nos.system('ls')",
        "from os import system\nsystem('ls')",
        "import os as o\no.execvp('ls', [])",
        "import subprocess as s\ns.run('ls', shell=True)",
        "import yaml\nyaml.load('x')",
        "import yaml\nyaml.load('x', yaml.Loader)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import torch\ntorch.hub.load('a', 'b')",
        "import os\ngetattr(os, 'system')('ls')",
        "import importlib\nimportlib.import_module('pickle')",
        "from torch.utils.cpp_extension import load\nload('x', [])",
    ],
)
def test_the_search_finds(source):
    assert findings(source, Path("anywhere.py"))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load('x', weights_only=True)",
        "import yaml\nyaml.load('x', Loader=yaml.SafeLoader)",
        "import os\nos.path.join('a', 'b')",
        "import torch\nmodel = torch.compile(lambda x: x)",
    ],
)
def test_the_search_lets_pass(source):
    assert findings(source, Path("anywhere.py")) == []


def test_only_this_packages_sources_are_compiled():
    """`compile_and_load` is given files beside the module that calls it, and they are part of the package."""
    compiled = []
    for path in sources(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and dotted(node.func, {}) == "compile_and_load":
                assert ast.unparse(node.args[0]) == "Path(__file__).with_name('native.c')"
                assert (path.parent / "native.c").is_file()
                compiled.append(path)
    assert compiled
