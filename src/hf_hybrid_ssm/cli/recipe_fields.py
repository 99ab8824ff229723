"""Which settings a recipe has, read from its source: nothing is imported, and torch least of all."""

import ast
import importlib.util
from pathlib import Path

OF_TRANSFORMERS = {"TrainingArguments": "training_args.py", "Seq2SeqTrainingArguments": "training_args_seq2seq.py"}


def setting_names(recipe: Path) -> set[str] | None:
    """The fields of the dataclasses that a recipe hands to `start`; None where one of them cannot be found so."""
    for node in ast.walk(_tree(recipe)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "start":
            by_class = [_fields(name.id, recipe) for name in node.args[2:] if isinstance(name, ast.Name)]
            return None if None in by_class else {field for names in by_class for field in names or ()}
    return None


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _fields(name: str, path: Path) -> set[str] | None:
    """The fields of a dataclass that the module at `path` defines or imports, with those of its bases."""
    tree = _tree(path)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            targets = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            own = {target.id for target in targets if isinstance(target, ast.Name)}
            bases = [_fields(base.id, path) for base in node.bases if isinstance(base, ast.Name)]
            return None if None in bases else own.union(*(base or () for base in bases))
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            source = _source(name, node, path)
            return None if source is None else _fields(name, source)
    return None


def _source(name: str, node: ast.ImportFrom, path: Path) -> Path | None:
    """The file that an import takes the class from: transformers' arguments, or a module beside the recipe."""
    module = node.module or ""
    if module == "transformers" or (node.level and name in OF_TRANSFORMERS):
        spec = importlib.util.find_spec("transformers")
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        known = OF_TRANSFORMERS.get(name)
        return Path(folders[0], known) if folders and known is not None else None
    for folder in (path.parent, path.parent.parent):
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        if file.is_file():
            return file
    return None
