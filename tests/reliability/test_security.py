"""The package executes nothing it was not shipped with: no pickle, no code from text, no shell, no network."""

import ast
from pathlib import Path

import pytest

import hf_hybrid_ssm

ROOT = Path(hf_hybrid_ssm.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "socket", "ssl", "urllib", "http", "requests", "httpx",
    "ftplib", "telnetlib", "smtplib", "aiohttp", "pty", "code", "codeop",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.spawnv"}
# the C kernels: a list of arguments, no shell, source files of this package alone
COMPILER = ROOT / "ops" / "native_library.py"


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def findings(source: str, path: Path) -> list[str]:
    """What a file does that the package must not."""
    found, tree = [], ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    safe_loaders = {c.name for c in classes if [dotted(base) for base in c.bases] == ["yaml.SafeLoader"]}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if "subprocess" in names and path != COMPILER:
            found.append("imports subprocess")
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in FORBIDDEN_CALLS:
            found.append(f"calls {called}")
        if called == "torch.load":
            only = keywords.get("weights_only")
            if not (isinstance(only, ast.Constant) and only.value is True):
                found.append("calls torch.load without weights_only=True")
        if "shell" in keywords:
            found.append(f"calls {called} with a shell")
        if called == "yaml.unsafe_load":
            found.append(f"calls {called}")
        if called == "yaml.load" and dotted(keywords.get("Loader", ast.Name(""))) not in safe_loaders:
            found.append("calls yaml.load without a safe loader")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_source_does_nothing_it_must_not(path):
    assert findings(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from urllib import request",
        "import subprocess",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import os\nos.system('ls')",
        "import subprocess as s\ns.run('ls', shell=True)",
        "import yaml\nyaml.load('x')",
    ],
)
def test_the_search_finds(source):
    assert findings(source, Path("anywhere.py"))


def test_only_this_packages_sources_are_compiled():
    """`compile_and_load` is given files beside the module that calls it, and they are part of the package."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and dotted(node.func) == "compile_and_load":
                assert ast.unparse(node.args[0]) == "Path(__file__).with_name('native.c')"
                assert (path.parent / "native.c").is_file()
