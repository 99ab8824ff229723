"""The modules that a class needs, found by reading their imports; nothing is imported for it."""

import ast
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = "hf_hybrid_ssm"
ROOT = Path(__file__).parents[1]
# within them, other names are bound than around them
SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One name that an import statement binds.

    Args:
        module: what is imported, or imported from.
        name: the object taken from it; None if the module itself is bound.
        local: the name it has afterwards.
    """

    module: str
    name: str | None
    local: str

    @property
    def is_ours(self) -> bool:
        return self.module.split(".")[0] == PACKAGE


@dataclass(frozen=True, eq=False)
class Module:
    """A module of this package, as text and as a tree."""

    name: str

    @cached_property
    def path(self) -> Path:
        path = _path(self.name)
        if path is None:
            raise ValueError(f"{self.name} is not a module of {PACKAGE}.")
        return path

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    @cached_property
    def imports(self) -> dict[str, Import]:
        """By local name, in the order of the source. Ours are at the top level only (enforced by a test)."""
        imports = []
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                imports += [Import(alias.name, None, alias.asname or alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module, local = str(node.module), alias.asname or alias.name
                    submodule = f"{module}.{alias.name}"
                    if module.split(".")[0] == PACKAGE and _path(submodule) is not None:
                        imports.append(Import(submodule, None, local))
                    else:
                        imports.append(Import(module, alias.name, local))
        return {each.local: each for each in imports}

    @cached_property
    def bound(self) -> tuple[set[str], set[str]]:
        """Names bound at the top level, but for imports and `__all__`; names bound within `SCOPES`."""
        outside: set[str] = set()
        inside: set[str] = set()
        body = [node for node in self.tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        pending: list[tuple[ast.AST, set[str]]] = [(node, outside) for node in body]
        while pending:
            node, names = pending.pop()
            names.update(_bound_by(node))
            within = inside if isinstance(node, SCOPES) else names
            pending += [(child, within) for child in ast.iter_child_nodes(node)]
        return outside - {"__all__"}, inside


def _bound_by(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            return [name]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
        case ast.alias(name=name, asname=other):
            return [(other or name).split(".")[0]]
        case ast.Global(names=names):
            return names
    return []


def _path(name: str) -> Path | None:
    """The file of a module of the package, or None."""
    where = ROOT.joinpath(*name.split(".")[1:])
    candidates = (where / "__init__.py", where.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None)


def needed_modules(entries: list[str]) -> list[Module]:
    """`entries` and all modules of the package that they need, each after what it imports itself.

    Raises:
        ValueError: modules import each other in a cycle.
    """
    needs: dict[str, list[str]] = {}
    modules: dict[str, Module] = {}
    pending = list(entries)
    while pending:
        name = pending.pop()
        if name not in needs:
            modules[name] = Module(name)
            needs[name] = sorted({imported.module for imported in modules[name].imports.values() if imported.is_ours})
            pending += needs[name]
    return [modules[name] for name in TopologicalSorter(needs).static_order()]
