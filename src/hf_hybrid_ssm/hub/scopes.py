"""Which names of a module's source mean what the module itself binds at its top level."""

import ast
from collections.abc import Iterator

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def bound_names(statements: list[ast.stmt]) -> set[str]:
    """Names that the statements bind in their own scope; what nested functions and classes bind is not among them."""
    names: set[str] = set()
    declared: set[str] = set()
    pending: list[ast.AST] = list(statements)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, (ast.Lambda, *_COMPREHENSIONS)):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Global):
            declared.update(node.names)
        pending.extend(ast.iter_child_nodes(node))
    return names - declared


class _Resolver(ast.NodeVisitor):
    def __init__(self) -> None:
        self.scopes: list[tuple[bool, set[str]]] = []  # (is a class, names bound there), innermost last
        self.found: list[ast.Name | ast.Global] = []

    def _is_global(self, name: str) -> bool:
        innermost = len(self.scopes) - 1
        return not any(
            name in names for depth, (is_class, names) in enumerate(self.scopes) if not is_class or depth == innermost
        )

    def visit_Name(self, node: ast.Name) -> None:
        if self._is_global(node.id):
            self.found.append(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.found.append(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        present = [argument for argument in every if argument is not None]
        outside: list[ast.AST | None] = [*arguments.defaults, *arguments.kw_defaults]
        outside += [argument.annotation for argument in present]
        body: list = [node.body] if isinstance(node, ast.Lambda) else node.body
        if not isinstance(node, ast.Lambda):
            outside += [*node.decorator_list, node.returns]
        for part in outside:
            if part is not None:
                self.visit(part)
        self._inside(False, {argument.arg for argument in present} | bound_names(body), body)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self._inside(True, bound_names(node.body), node.body)

    def _comprehension(self, node: ast.AST) -> None:
        targets = [generator.target for generator in node.generators]  # type: ignore[attr-defined]
        names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        self._inside(False, names, list(ast.iter_child_nodes(node)))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _inside(self, is_class: bool, names: set[str], body: list) -> None:
        self.scopes.append((is_class, names))
        for part in body:
            self.visit(part)
        self.scopes.pop()


def global_names(tree: ast.Module) -> Iterator[ast.Name | ast.Global]:
    """Every use of a name that is looked up in the module (or the builtins), and every `global` statement."""
    resolver = _Resolver()
    resolver.visit(tree)
    yield from resolver.found
