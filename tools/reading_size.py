"""How much there is to read of a family, from its configuration to its kernels: files and lines, counted over imports.

python tools/reading_size.py             every model type
python tools/reading_size.py bst --list  the files of one

It follows the imports of the family's modeling file within this package, and the kernels of the ops found on the way,
with their C sources. Every file counts whole, though a model seldom uses all of it. The first count is that of the
default configuration, without the mixers that it does not choose and the files of options that are off (`OPTIONAL`);
it is also given by level.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import hf_hybrid_ssm
from hf_hybrid_ssm.hub.sources import PACKAGE, ROOT, Module
from hf_hybrid_ssm.layers.mixers.registry import MIXERS
from hf_hybrid_ssm.models import FAMILIES, family_of
from hf_hybrid_ssm.models.family import Family

LEVELS = ("models and layers", "ops in torch", "kernels in C and Triton")
# modules of options that are off in a family's default configuration, by model type
OPTIONAL = {
    "longhorn": ("models.longhorn.attention_longhorn",),
    "bst": ("models.bst.block_states", "models.bst.recurrent_states", "models.bst.retrieval"),
    "lmu_isa": ("layers.local_self_attention",),
    "spade": ("models.spade.options_spade",),
    "spade_seq2seq": ("models.spade.options_spade",),
}


def files_of(model_type: str, every_option: bool = False) -> list[Path]:
    """All files that a reader of a family goes through, sorted.

    Raises:
        ValueError: there is no such family.
    """
    family = family_of(model_type)
    left_out = set() if every_option else _other_mixers(family) | optional_modules(model_type)
    modules = _reached(sorted(set(family.module_of.values())), left_out)
    kernels = _reached(sorted({kernel for module in modules for kernel in _kernels(module)}), left_out)
    paths = {module.path for module in (*modules, *kernels)}
    return sorted(paths | {source for path in paths for source in _c_sources(path)})


def _other_mixers(family: Family) -> set[str]:
    """The modules of the mixers that the family's default configuration does not choose, and that its own does not
    need."""
    chosen = getattr(getattr(hf_hybrid_ssm, family.config)(), "ssm_type", None)
    used = {module.name for module in _reached([MIXERS[chosen].__module__], set())} if chosen else set()
    return {mixer.__module__ for mixer in MIXERS.values()} - used


def optional_modules(model_type: str) -> set[str]:
    """The modules of a family's options that are off by default."""
    return {f"{PACKAGE}.{name}" for name in OPTIONAL.get(model_type, ())}


def _reached(entries: list[str], left_out: set[str]) -> list[Module]:
    """The modules that can be reached from `entries` by imports, without passing those left out."""
    found: dict[str, Module] = {}
    pending = list(entries)
    while pending:
        name = pending.pop()
        if name not in found and name not in left_out:
            found[name] = Module(name)
            pending += [imported.module for imported in found[name].imports.values() if imported.is_ours]
    return list(found.values())


def _kernels(module: Module) -> Iterator[str]:
    """The modules that an op of `module` names as its kernels."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Dict):
            names = (value.value for value in node.values if isinstance(value, ast.Constant))
            yield from (str(name) for name in names if str(name).startswith("hf_hybrid_ssm.ops."))


def _c_sources(path: Path) -> list[Path]:
    """The C file of a kernel, and the headers that it includes."""
    source = path.with_suffix(".c")
    if not source.is_file():
        return []
    words = (line.split() for line in source.read_text(encoding="utf-8").splitlines() if '#include "' in line)
    headers = [next(ROOT.rglob(Path(included.strip('"')).name)) for _, included in words]
    return [source, *headers]


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def level_of(path: Path) -> str:
    """One of LEVELS."""
    folder, *_ = path.relative_to(ROOT).parts
    if folder != "ops":
        return LEVELS[0]
    is_kernel = path.suffix in (".c", ".h") or path.stem.startswith(("native", "triton"))
    return LEVELS[2 if is_kernel else 1]


def _size(paths: list[Path]) -> str:
    return f"{len(paths)} / {sum(map(lines_of, paths)):,}"


def table(model_types: list[str]) -> str:
    """Files / lines of each."""
    lines = [f"| files / lines | all | {' | '.join(LEVELS)} | with every option |", "| --- |" + " ---: |" * 5]
    for model_type in model_types:
        paths = files_of(model_type)
        levels = ([path for path in paths if level_of(path) == level] for level in LEVELS)
        sizes = map(_size, (paths, *levels, files_of(model_type, every_option=True)))
        lines.append(f"| `{model_type}` | {' | '.join(sizes)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_type", nargs="?", help=", ".join(family.model_type for family in FAMILIES))
    parser.add_argument("--list", action="store_true", help="name the files")
    arguments = parser.parse_args()
    every = [family.model_type for family in FAMILIES]
    chosen = [arguments.model_type] if arguments.model_type else every
    if arguments.list:
        for path in files_of(arguments.model_type or parser.error("--list takes one model type")):
            print(f"{lines_of(path):6}  {path.relative_to(ROOT)}")
    print(table(chosen))


if __name__ == "__main__":
    main()
