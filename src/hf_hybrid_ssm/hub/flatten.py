"""Modules merged into few flat files that import each other by one dot, all that transformers' remote code can load.

The text stays as it was written, comments included, except for: imports (gathered at the head of each file), names
that two merged modules both define (qualified by their module: `reference.run` becomes `reference_run`), and the names
of custom ops.
"""

import ast
import builtins
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import accumulate

from hf_hybrid_ssm.hub.sources import PACKAGE, Import, Module

WIDTH = 119
KERNELS = f"{PACKAGE}_kernels"
"""The package of Triton kernels that exported code imports where there is one."""
Symbol = tuple[str, str]
"""A module and a name that it defines."""
Edit = tuple[int, int, str]
"""First byte and end of what is replaced, and the text in its place."""

# What torch registers has one name for the whole process, and a process may load the same code from two folders.
LIBRARY = "_LIBRARY"
LIBRARY_LINE = (
    "# Each loaded copy registers ops of its own. A name of torch's is ASCII; that of a folder need not be.\n"
    f'{LIBRARY} = "{PACKAGE}_" + re.sub(r"\\W", "_", __name__.encode("ascii", "backslashreplace").decode())'
)


@dataclass
class _File:
    """One file to be written.

    Args:
        modules: what it is made of, each after what it needs.
        final: what a name defined in one of the modules is called here.
        externals: imports from other packages, by the name they bind.
        imported: names of other files → what they are called here.
    """

    name: str
    modules: list[Module] = field(default_factory=list)
    final: dict[Symbol, str] = field(default_factory=dict)
    externals: dict[str, Import] = field(default_factory=dict)
    imported: dict[Symbol, str] = field(default_factory=dict)

    def choose_names(self) -> None:
        for each in (each for module in self.modules for each in module.imports.values() if not each.is_ours):
            if self.externals.setdefault(each.local, each) != each:
                known = self.externals[each.local].module
                raise ValueError(f"{self.name}: {each.local} is imported from {known} and {each.module}.")
        symbols = [(module.name, name) for module in self.modules for name in sorted(module.bound[0])]
        count = Counter(name for _, name in symbols)
        for symbol in symbols:
            clashes = count[symbol[1]] > 1 or symbol[1] in self.externals
            self.final[symbol] = _qualified(symbol) if clashes else symbol[1]
        finals = Counter(self.final.values())
        if repeated := [name for name, times in finals.items() if times > 1 or hasattr(builtins, name)]:
            raise ValueError(f"{self.name}: {repeated} would be ambiguous.")


def flatten(modules: list[Module], file_of: Callable[[str], str], offered: Iterable[Symbol] = ()) -> dict[str, str]:
    """Python source by file name (without `.py`).

    Args:
        modules: closed under imports, each after what it imports.
        file_of: name of a module → name of the file that takes it in.
        offered: names of modules that others will look up in their files, also those only imported there.

    Raises:
        ValueError: the modules use what cannot be flattened; the message says where.
    """
    flattening = _Flattening(modules, file_of)
    for module, name in offered:
        symbol = flattening.origin(flattening.modules[module], name)
        flattening.name_in(flattening.home[module], symbol, name)
    return flattening.texts()


def _qualified(symbol: Symbol) -> str:
    module, name = symbol
    last = module.rsplit(".", 1)[1]
    if name.isupper():
        last = last.upper()
    return f"_{last}{name}" if name.startswith("_") else f"{last}_{name}"


class _Flattening:
    def __init__(self, modules: list[Module], file_of: Callable[[str], str]):
        self.modules = {module.name: module for module in modules}
        self.files: dict[str, _File] = {}
        self.home: dict[str, _File] = {}
        for module in modules:
            name = file_of(module.name)
            self.home[module.name] = self.files.setdefault(name, _File(name))
            self.home[module.name].modules.append(module)
        for file in self.files.values():
            file.choose_names()

    def texts(self) -> dict[str, str]:
        texts = {}
        for file in self.files.values():
            text = "\n\n\n".join(body for module in file.modules if (body := self.body(module))) + "\n"
            texts[file.name] = self.head(file, registers_ops=LIBRARY in text) + "\n" + text
        needs = {file.name: {self.home[module].name for module, _ in file.imported} for file in self.files.values()}
        TopologicalSorter(needs).prepare()  # a ValueError if files import each other in a cycle
        return texts

    def origin(self, module: Module, name: str) -> Symbol:
        """Where `name`, as `module` knows it, is defined."""
        if name in module.bound[0]:
            return module.name, name
        each = module.imports.get(name)
        if each is None or not each.is_ours or each.name is None:
            raise ValueError(f"{module.name} does not define {name}.")
        return self.origin(self.modules[each.module], each.name)

    def name_in(self, file: _File, symbol: Symbol, wish: str) -> str:
        """What a name of the package is called in `file`; one of another file is imported."""
        owner = self.home[symbol[0]]
        if owner is file:
            return file.final[symbol]
        if symbol not in file.imported:
            taken = {*file.final.values(), *file.externals, *file.imported.values()}
            choices = (wish, owner.final[symbol], _qualified(symbol), f"{owner.name}_{owner.final[symbol]}")
            free = next((name for name in choices if name not in taken), None)
            if free is None:
                raise ValueError(f"{file.name}: no free name for {symbol[1]} of {symbol[0]}.")
            file.imported[symbol] = free
        return file.imported[symbol]

    def body(self, module: Module) -> str:
        """The module's own text below its imports, headed by what it is, with the names of its file."""
        places = _Places(module)
        text = places.text
        for start, end, new in sorted({*self.names(module), *places.dropped()}, reverse=True):
            text = text[:start] + new.encode() + text[end:]
        body = re.sub("\n{4,}", "\n\n\n", text.decode().strip("\n"))
        return f"{_title(module)}\n\n{body}" if body else ""

    def head(self, file: _File, registers_ops: bool) -> str:
        """The imports of a file, in three sections."""
        externals = list(file.externals.values())
        if registers_ops and "re" not in file.externals:
            externals.append(Import("re", None, "re"))
        standard = [each for each in externals if each.module.split(".")[0] in sys.stdlib_module_names]
        others = [each for each in externals if each not in standard]
        relative = [
            Import(f".{self.home[symbol[0]].name}", self.home[symbol[0]].final[symbol], local)
            for symbol, local in file.imported.items()
        ]
        sections = ["\n".join(_statements(section)) for section in (standard, others, relative) if section]
        if registers_ops:
            sections.append(LIBRARY_LINE)
        return "".join(f"{section}\n\n" for section in sections)

    def names(self, module: Module) -> Iterator[Edit]:
        """What is called something else in the file than in the module, wherever it stands."""
        file = self.home[module.name]
        places = _Places(module)
        done: set[ast.AST] = set()  # names that are edited as part of something else
        for node in ast.walk(module.tree):
            match node:
                case ast.Attribute(value=ast.Name(id=old)) if self.is_module(module, old):
                    done.add(node.value)
                    symbol = self.origin(self.modules[module.imports[old].module], node.attr)
                    yield places.edit(node, old, self.name_in(file, symbol, _qualified(symbol)))
                case ast.Name(id=old) if node not in done:
                    if self.is_module(module, old):
                        raise ValueError(f"{module.name}: the module {old} is used as a value.")
                    is_ours = old in module.imports and module.imports[old].is_ours
                    if is_ours or old in module.bound[0]:
                        yield places.edit(node, old, self.name_in(file, self.origin(module, old), old))
                case ast.FunctionDef(name=old) | ast.AsyncFunctionDef(name=old) | ast.ClassDef(name=old):
                    if old in module.bound[0]:
                        yield places.edit(node, old, file.final[module.name, old])
                case ast.Call(func=ast.Name(id="Op")):
                    # C stays in the package, Triton in a folder that may be installed or not
                    kernels = (keyword.value for keyword in node.keywords if keyword.arg == "kernels")
                    yield from (places.edit(value, None, _travelling(value)) for value in kernels)
                case ast.Constant(value=str(text)) if text.startswith(f"{PACKAGE}::"):
                    yield places.edit(node, None, f'{LIBRARY} + "{text.removeprefix(PACKAGE)}"')

    def is_module(self, module: Module, name: str) -> bool:
        each = module.imports.get(name)
        return each is not None and each.is_ours and each.name is None


class _Places:
    """The positions of a module's nodes in its text."""

    def __init__(self, module: Module):
        self.module = module
        self.text = module.source.encode()
        self.starts = [0, *accumulate(len(line) for line in self.text.splitlines(keepends=True))]

    def edit(self, node: ast.expr | ast.stmt, old: str | None, new: str) -> Edit:
        """Puts `new` in place of a node; of a definition, in place of its name `old`."""
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[int(node.end_lineno or node.lineno) - 1] + int(node.end_col_offset or 0)
        if isinstance(node, ast.stmt) and old:
            start += len(re.match(rb"(async def|def|class) +", self.text[start:])[0])  # type: ignore[index]
            end = start + len(old)
        if old and not self.text[start:end].startswith(old.encode()):
            raise ValueError(f"{self.module.name}:{node.lineno}: {old} is in a formatted string over several lines.")
        # scopes are not analysed: a name that is replaced must have one meaning in the whole module
        if old and old != new and (meant := self.module.bound[1] & {old, new}):
            raise ValueError(f"{self.module.name}: {meant} means something else inside a function.")
        return start, end, new

    def dropped(self) -> Iterator[Edit]:
        """What does not travel: imports, `__all__`, and the docstring with the licence above it, for which there are a
        title and the head of the file."""
        for index, node in enumerate(self.module.tree.body):
            is_docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            if is_docstring or is_all or isinstance(node, ast.Import | ast.ImportFrom):
                start = 0 if is_docstring else self.starts[node.lineno - 1]
                yield start, self.starts[int(node.end_lineno or node.lineno)] - 1, ""


def triton_kernels(module: Module) -> Iterator[Symbol]:
    """The Triton implementations, by module and function, of the ops that `module` defines."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Op":
            arguments = {keyword.arg: keyword.value for keyword in node.keywords}
            named = ast.literal_eval(arguments["kernels"]) if "kernels" in arguments else {}
            if "triton" in named:
                yield named["triton"], f"{ast.literal_eval(node.args[0])}_triton"


def kernel_file(module: str) -> str:
    """The file, without `.py`, of a module of ops in the folder of kernels."""
    return "_".join(module.removeprefix(f"{PACKAGE}.ops.").split("."))


def _travelling(kernels: ast.expr) -> str:
    """What an op's `kernels` are in exported code: those of the folder that `hub.kernels` writes."""
    files = {
        backend: f"{KERNELS}.{kernel_file(module)}"
        for backend, module in ast.literal_eval(kernels).items()
        if backend == "triton"
    }
    return json.dumps(files)


def _title(module: Module) -> str:
    where = module.path.as_posix().rsplit(f"/{PACKAGE}/", 1)[1]
    lines = (ast.get_docstring(module.tree) or "").splitlines()
    return "\n".join([f"{f'# ---- {where} ':-<{WIDTH}}", *(f"# {line}".rstrip() for line in lines)])


def _statements(imports: Iterable[Import]) -> Iterator[str]:
    """Sorted; one for each module that names are taken from."""
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for each in imports:
        if each.name is None:
            plain.add(each.module if each.local == each.module else f"{each.module} as {each.local}")
        else:
            name = each.name if each.local == each.name else f"{each.name} as {each.local}"
            names.setdefault(each.module, set()).add(name)
    yield from (f"import {name}" for name in sorted(plain))
    for module in sorted(names):
        line = f"from {module} import {', '.join(sorted(names[module]))}"
        if len(line) > WIDTH:
            wrapped = textwrap.fill(", ".join(sorted(names[module])), WIDTH - 4)
            line = f"from {module} import (\n{textwrap.indent(wrapped, '    ')},\n)"
        yield line
