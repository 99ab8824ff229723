"""Modules merged into few flat files that import each other by one dot, all that transformers' remote code can load.

The text stays as it was written, comments included, but for: imports (gathered at the head of each file), names that
two merged modules both define (qualified by their module: `reference.run` becomes `reference_run`), and the names of
custom ops.
"""

import ast
import builtins
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hf_hybrid_ssm.hub.scopes import bound_names, global_names
from hf_hybrid_ssm.hub.sources import PACKAGE, Import, Module

WIDTH = 119
Symbol = tuple[str, str]
"""A module and a name that it defines."""

# What torch registers has one name for the whole process, and a process may load the same code from two folders.
LIBRARY = "_LIBRARY"
LIBRARY_LINE = f'{LIBRARY} = "{PACKAGE}_" + re.sub(r"\\W", "_", __name__)  # each loaded copy registers ops of its own'


@dataclass
class _File:
    """One file to be written.

    Args:
        modules: what it is made of, each behind what it needs.
        final: what a name defined in one of the modules is called here.
        externals: imports from other packages, by the name they bind.
        imported: names of other files → what they are called here.
    """

    name: str
    modules: list[Module]
    final: dict[Symbol, str] = field(default_factory=dict)
    externals: dict[str, Import] = field(default_factory=dict)
    imported: dict[Symbol, str] = field(default_factory=dict)
    registers_ops: bool = False


@dataclass
class _Edit:
    node: ast.expr | ast.stmt
    text: str


def flatten(modules: list[Module], file_of: Callable[[str], str]) -> dict[str, str]:
    """Python source by file name (without `.py`).

    Args:
        modules: closed under imports, each behind what it imports.
        file_of: name of a module → name of the file that takes it in.

    Raises:
        ValueError: the modules use what cannot be flattened; the message says where.
    """
    files: dict[str, _File] = {}
    for module in modules:
        name = file_of(module.name)
        files.setdefault(name, _File(name, [])).modules.append(module)
    by_module = {module.name: module for module in modules}
    home = {module.name: files[file_of(module.name)] for module in modules}
    for file in files.values():
        _choose_names(file)
    texts = {}
    for file in files.values():
        bodies = [_body(module, file, home, by_module) for module in file.modules]
        texts[file.name] = _head(file, home) + "\n\n\n".join(body for body in bodies if body) + "\n"
    _refuse_circles(files, home)
    return texts


def _definitions(module: Module) -> set[str]:
    return bound_names([node for node in module.tree.body if not isinstance(node, ast.Import | ast.ImportFrom)])


def _choose_names(file: _File) -> None:
    for module in file.modules:
        for found in module.imports:
            if found.is_ours:
                continue
            known = file.externals.setdefault(found.local, found)
            if (known.module, known.name) != (found.module, found.name):
                raise ValueError(f"{file.name}: {found.local} is imported from {known.module} and {found.module}.")
    count = Counter(name for module in file.modules for name in _definitions(module))
    for module in file.modules:
        for name in _definitions(module):
            clashes = count[name] > 1 or name in file.externals
            file.final[module.name, name] = _qualified(module.name, name) if clashes else name
    finals = Counter(final for (_, name), final in file.final.items() if name != "__all__")
    if repeated := [name for name, times in finals.items() if times > 1 or hasattr(builtins, name)]:
        raise ValueError(f"{file.name}: {repeated} would be ambiguous.")


def _qualified(module: str, name: str) -> str:
    last = module.rsplit(".", 1)[1]
    if name.isupper():
        last = last.upper()
    return f"_{last}{name}" if name.startswith("_") else f"{last}_{name}"


def _origin(name: str, module: Module, by_module: dict[str, Module]) -> Symbol:
    """Where `name`, as `module` knows it, is defined."""
    if name in _definitions(module):
        return module.name, name
    for found in module.imports:
        if found.local == name and found.is_ours and found.name is not None:
            return _origin(found.name, by_module[found.module], by_module)
    raise ValueError(f"{module.name} does not define {name}.")


def _symbol_name(symbol: Symbol, wish: str, file: _File, home: dict[str, _File]) -> str:
    """What a name of the package is called in `file`; one of another file is imported."""
    owner = home[symbol[0]]
    if owner is file:
        return file.final[symbol]
    if symbol not in file.imported:
        taken = {*file.final.values(), *file.externals, *file.imported.values()}
        choices = (wish, owner.final[symbol], _qualified(*symbol), f"{owner.name}_{owner.final[symbol]}")
        free = next((name for name in choices if name not in taken), None)
        if free is None:
            raise ValueError(f"{file.name}: no free name for {symbol[1]} of {symbol[0]}.")
        file.imported[symbol] = free
    return file.imported[symbol]


def _edits(module: Module, file: _File, home: dict[str, _File], by_module: dict[str, Module]) -> Iterator[_Edit]:
    ours = {found.local: found for found in module.imports if found.is_ours}
    definitions = _definitions(module)
    uses = list(global_names(module.tree))
    globals_here = {id(node) for node in uses}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and id(node.value) in globals_here:
            found = ours.get(node.value.id)  # type: ignore[attr-defined]
            if found is not None and found.name is None:
                symbol = _origin(node.attr, by_module[found.module], by_module)
                globals_here.remove(id(node.value))
                yield _Edit(node, _symbol_name(symbol, _qualified(*symbol), file, home))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Op":
            # kernels stay behind: each op runs its torch implementation
            yield from (_Edit(keyword.value, "{}") for keyword in node.keywords if keyword.arg == "optional")
        elif isinstance(node, ast.Constant) and str(node.value).startswith(f"{PACKAGE}::"):
            file.registers_ops = True
            yield _Edit(node, f'{LIBRARY} + "{str(node.value).removeprefix(PACKAGE)}"')
    for use in uses:
        if isinstance(use, ast.Global):
            if any(file.final.get((module.name, name), name) != name for name in use.names):
                raise ValueError(f"{module.name}: {use.names} are global and would be renamed.")
        elif id(use) in globals_here:
            if use.id in ours:
                found = ours[use.id]
                if found.name is None:
                    raise ValueError(f"{module.name}: the module {use.id} is used as a value.")
                symbol = _origin(found.name, by_module[found.module], by_module)
                name = _symbol_name(symbol, use.id, file, home)
            elif use.id in definitions:
                name = file.final[module.name, use.id]
            else:
                continue
            if name != use.id:
                yield _Edit(use, name)


def _defined_names(module: Module, file: _File) -> Iterator[tuple[int, str, str]]:
    """Line, old and new name of functions and classes that are called something else here."""
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = file.final[module.name, node.name]
            if name != node.name:
                yield node.lineno, node.name, name


def _local_names(module: Module) -> set[str]:
    """Everything that some function or class of the module binds for itself."""
    names = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names |= bound_names(node.body)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _body(module: Module, file: _File, home: dict[str, _File], by_module: dict[str, Module]) -> str:
    """The module's own text below its imports, headed by what it is, with the names of `file`."""
    lines: list[bytes | None] = [line.encode() for line in module.source.splitlines()]
    local = _local_names(module)
    # a function within `Op(optional={...})` is edited as part of it
    edits = sorted(
        _edits(module, file, home, by_module),
        key=lambda edit: (edit.node.lineno, edit.node.col_offset),
        reverse=True,
    )
    for edit in edits:
        if edit.text.isidentifier() and edit.text in local:
            raise ValueError(f"{module.name}: {edit.text} means something else inside a function.")
        _replace(lines, edit, module)
    for line, old, new in _defined_names(module, file):
        lines[line - 1] = (lines[line - 1] or b"").replace(f" {old}".encode(), f" {new}".encode(), 1)
    for first, last in _dropped(module):
        lines[first - 1 : last] = [b""] * (last - first + 1)
    kept = "\n".join(line.decode() for line in lines if line is not None).strip("\n")
    while "\n\n\n\n" in kept:
        kept = kept.replace("\n\n\n\n", "\n\n\n")
    return f"{_title(module)}\n\n{kept}" if kept else ""


def _replace(lines: list[bytes | None], edit: _Edit, module: Module) -> None:
    """Put the text of `edit` in place of its node, whose lines below it become empty."""
    node = edit.node
    first, last = node.lineno - 1, int(node.end_lineno or node.lineno) - 1
    head = lines[first] or b""
    old = head[node.col_offset :]
    expected = node.id if isinstance(node, ast.Name) else None
    if expected is not None and not old.startswith(expected.encode()):
        raise ValueError(f"{module.name}:{node.lineno}: {expected} stands in a formatted string over several lines.")
    tail = (lines[last] or b"")[node.end_col_offset :]
    lines[first] = head[: node.col_offset] + edit.text.encode() + tail
    for index in range(first + 1, last + 1):
        lines[index] = None


def _dropped(module: Module) -> Iterator[tuple[int, int]]:
    """First and last line of what does not travel: imports, the docstring (a title takes its place), `__all__`."""
    for index, node in enumerate(module.tree.body):
        is_docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if is_docstring or is_all or isinstance(node, ast.Import | ast.ImportFrom):
            yield node.lineno, int(node.end_lineno or node.lineno)


def _title(module: Module) -> str:
    where = module.path.as_posix().rsplit(f"/{PACKAGE}/", 1)[1]
    text = [f"{f'# ---- {where} ':-<{WIDTH}}"]
    for line in (ast.get_docstring(module.tree) or "").splitlines():
        text.append(f"# {line}".rstrip())
    return "\n".join(text)


def _head(file: _File, home: dict[str, _File]) -> str:
    if file.registers_ops:
        file.externals.setdefault("re", Import("re", None, "re"))
    externals = list(file.externals.values())
    standard = [found for found in externals if found.module.split(".")[0] in sys.stdlib_module_names]
    others = [found for found in externals if found not in standard]
    relative = [
        Import(f".{home[symbol[0]].name}", home[symbol[0]].final[symbol], local)
        for symbol, local in file.imported.items()
    ]
    sections = ["\n".join(_statements(section)) for section in (standard, others, relative) if section]
    if file.registers_ops:
        sections.append(LIBRARY_LINE)
    return "".join(f"{section}\n\n" for section in sections)


def _statements(imports: Iterable[Import]) -> Iterator[str]:
    """Import statements, sorted; one for each module that names are taken from."""
    names: dict[str, set[str]] = {}
    plain = set()
    for found in imports:
        if found.name is None:
            plain.add(found.module if found.local == found.module else f"{found.module} as {found.local}")
        else:
            name = found.name if found.local == found.name else f"{found.name} as {found.local}"
            names.setdefault(found.module, set()).add(name)
    yield from (f"import {name}" for name in sorted(plain))
    for module in sorted(names):
        line = f"from {module} import {', '.join(sorted(names[module]))}"
        if len(line) > WIDTH:
            wrapped = textwrap.fill(", ".join(sorted(names[module])), WIDTH - 4)
            line = f"from {module} import (\n{textwrap.indent(wrapped, '    ')},\n)"
        yield line


def _refuse_circles(files: dict[str, _File], home: dict[str, _File]) -> None:
    needs = {file.name: {home[symbol[0]].name for symbol in file.imported} for file in files.values()}
    while needs:
        ready = {name for name, others in needs.items() if not others & needs.keys()}
        if not ready:
            raise ValueError(f"the files {sorted(needs)} import each other in a circle.")
        needs = {name: others for name, others in needs.items() if name not in ready}
