"""What source files must not do, found in their syntax trees.

    python -m tests.reliability.security

Writes docs/reliability/security.md. Exits with 1 on a finding.
"""

import ast
import sys
from pathlib import Path

import hf_hybrid_ssm
from tests.reliability.reporting import table, write_page

PACKAGE = Path(hf_hybrid_ssm.__file__).parent
RECIPES = Path(__file__).parents[2] / "recipes"
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "socket", "ssl", "urllib",
    "urllib3", "http", "requests", "httpx", "ftplib", "telnetlib", "smtplib", "aiohttp", "websockets", "socketserver",
    "xmlrpc", "pty", "code", "codeop", "multiprocessing",
}  # fmt: skip
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.fork", "builtins.eval", "builtins.exec",
    "numpy.load", "torch.hub.load", "torch.jit.load", "torch.package.PackageImporter", "yaml.unsafe_load",
    "yaml.full_load", "runpy.run_path", "runpy.run_module",
}  # fmt: skip
FORBIDDEN_FAMILIES = ("os.exec", "os.spawn", "os.posix_spawn", "torch.utils.cpp_extension.")
# the C kernels: a list of arguments, no shell, source files of this package alone
COMPILER = PACKAGE / "ops" / "_core" / "native_library.py"
RULES = (
    ("unpickling", "no import of pickle and its relatives, `torch.load` with `weights_only=True` alone"),
    ("code from text", "no `eval`, `exec`, `compile`, `__import__`, `runpy`, `torch.hub.load`, unsafe YAML"),
    (
        "other programs",
        "no `os.system`, `os.popen`, `os.exec*`, `os.spawn*`, `shell=`, `subprocess`, `multiprocessing`",
    ),
    ("network", "no import of `socket`, `ssl`, `urllib`, `http`, `requests` and their relatives"),
)


def aliases(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for: `from os import system` makes system → os.system."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`a.b.c` as text with `a` resolved; empty for anything that is no chain of names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, names.get(node.id, node.id)])) if isinstance(node, ast.Name) else ""


def findings(source: str, path: Path) -> list[str]:
    """What a file does that it must not."""
    tree = ast.parse(source)
    names = aliases(tree)
    safe_loaders = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and [dotted(base, names) for base in node.bases] == ["yaml.SafeLoader"]
    } | {"yaml.SafeLoader", "yaml.CSafeLoader"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += _imports(node, path)
        elif isinstance(node, ast.Call):
            found += _call(node, names, safe_loaders)
    return found


def _imports(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    found = [f"imports {name}" for name in modules if name.split(".")[0] in FORBIDDEN_MODULES]
    if "subprocess" in modules and path != COMPILER:
        found.append("imports subprocess")
    return found


def _call(node: ast.Call, names: dict[str, str], safe_loaders: set[str]) -> list[str]:
    called, found = dotted(node.func, names), []
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if called in FORBIDDEN_CALLS or called.startswith(FORBIDDEN_FAMILIES):
        found.append(f"calls {called}")
    if called == "torch.load":
        only = keywords.get("weights_only")
        if not (isinstance(only, ast.Constant) and only.value is True):
            found.append("calls torch.load without weights_only=True")
    if "shell" in keywords:
        found.append(f"calls {called} with a shell")
    if called == "yaml.load":
        loader = keywords.get("Loader") or (node.args[1] if len(node.args) > 1 else ast.Name(""))
        if dotted(loader, names) not in safe_loaders:
            found.append("calls yaml.load without a safe loader")
    if called in ("getattr", "importlib.import_module") and any(
        isinstance(a, ast.Constant) and a.value in ("eval", "exec", "system", "popen", "pickle") for a in node.args
    ):
        found.append(f"reaches for forbidden names by {called}")
    return found


def sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def main() -> int:
    rows, total = [], 0
    for name, root in (("src/hf_hybrid_ssm", PACKAGE), ("recipes", RECIPES)):
        found = [f"{p.relative_to(root)} {f}" for p in sources(root) for f in findings(p.read_text("utf-8"), p)]
        calls = sum(isinstance(n, ast.Call) for p in sources(root) for n in ast.walk(ast.parse(p.read_text("utf-8"))))
        rows.append([name, len(sources(root)), calls, "; ".join(found) or "none"])
        total += len(found)
    write_page(
        "security",
        "What the source must not do, searched",
        "`make security` reads the syntax tree of every Python file, with imported names resolved.",
        table(["searched for", "rule"], RULES),
        table(["folder", "files", "calls read", "findings"], rows),
        "One exception is declared: `src/hf_hybrid_ssm/ops/_core/native_library.py` starts the C compiler, with a list of "
        "arguments and no shell, and a test holds that only the `native.c` files of this package are given to it.",
        "What a syntax tree cannot show: names made up at run time, and what the dependencies do. Checkpoints that "
        "try to execute something are part of `docs/reliability/fuzz.md`.",
    )
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
