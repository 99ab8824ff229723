"""The modules that a class needs, found by reading their imports; nothing is imported for it."""

import ast
import importlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "hf_hybrid_ssm"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, eq=False)
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
        found = _path(self.name)
        if found is None:
            raise ValueError(f"{self.name} is no module of {PACKAGE}.")
        return found

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    @cached_property
    def imports(self) -> list[Import]:
        """In the order of the source. Ours stand at the top level only (a test holds that)."""
        found = []
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                found += [Import(alias.name, None, alias.asname or alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = str(node.module)
                for alias in node.names:
                    local, submodule = alias.asname or alias.name, f"{module}.{alias.name}"
                    if module.split(".")[0] == PACKAGE and _path(submodule) is not None:
                        found.append(Import(submodule, None, local))
                    else:
                        found.append(Import(module, alias.name, local))
        return found


def _path(name: str) -> Path | None:
    """Where a module of the package lies, or None."""
    where = ROOT.joinpath(*name.split(".")[1:])
    candidates = (where / "__init__.py", where.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None)


def needed_modules(entries: list[str]) -> list[Module]:
    """`entries` and all modules of the package that they need, each behind what it imports itself."""
    ordered: dict[str, Module] = {}
    entered: set[str] = set()

    def visit(name: str) -> None:
        if name in ordered:
            return
        if name in entered:
            raise ValueError(f"{name} imports itself, through others.")
        entered.add(name)
        module = Module(name)
        for dependency in sorted({found.module for found in module.imports if found.is_ours}):
            visit(dependency)
        ordered[name] = module

    for entry in entries:
        visit(entry)
    return list(ordered.values())


def module_of_class(package: str, name: str) -> str:
    """The module that defines the public class `name` of a family's package, read from its lazy table."""
    return getattr(importlib.import_module(package), name).__module__
