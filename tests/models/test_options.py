"""An option is there because something sets it, or because a paper has it: the family's page then says where."""

import ast
import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

import hf_hybrid_ssm
from hf_hybrid_ssm.models import FAMILIES
from hf_hybrid_ssm.models.spade.modeling_spade import StackOfCheckpoint

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/hf_hybrid_ssm"
HEADING = "## Options of the papers that nothing here sets"
# what heads of transformers read of any configuration: the dropout before a classifier
OF_TRANSFORMERS = {"classifier_dropout", "hidden_dropout"}
ROW = re.compile(r"^\| (`[^|]*`) \| ([^|]*) \| `(tests/[\w/.]+)::(test_\w+)` \|$", re.MULTILINE)


def names_set_by(path):
    """What Python passes by keyword, has in a dictionary, or assigns as an attribute or item; the keys of a YAML
    file."""
    return names_set_in(path.read_text(encoding="utf-8"), path.suffix)


def names_set_in(text, suffix=".py"):
    if suffix == ".yaml":
        return set(re.findall(r"\b(\w+):", text))
    if suffix == ".md":
        text = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    names = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.keyword(arg=str(name)) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Dict():
                names |= {part.value for part in (*node.keys, *node.values) if isinstance(part, ast.Constant)}
            case ast.Subscript(slice=ast.Constant(value=name), ctx=ast.Store()):
                names.add(name)
            case ast.Call(func=ast.Attribute(attr="setdefault"), args=[ast.Constant(value=name), *_]):
                names.add(name)
    return names


@cache
def set_somewhere():
    """By recipes, benchmarks, converters, memories of students, and by what chooses the stack of a checkpoint."""
    folders = [(ROOT / "recipes", "*.py"), (ROOT / "recipes/configs", "*.yaml"), (ROOT / "benchmarks", "*.py")]
    folders += [(SRC / "students", "*.py"), (SRC / "upcycle", "*.py"), (SRC / "hub/official", "*.py")]
    paths = [path for folder, pattern in folders for path in folder.rglob(pattern)] + [ROOT / "docs/upcycling.md"]
    return names_set_in(inspect.getsource(StackOfCheckpoint)).union(*map(names_set_by, paths))


def options_of(config_class):
    """The fields that are the family's own."""
    usual = {field.name for field in dataclasses.fields(PreTrainedConfig)} | OF_TRANSFORMERS
    return {field.name for field in dataclasses.fields(config_class)} - usual


def options_of_presets(config_class):
    return {name for fields in config_class.presets.values() for name in fields}


def listed_on(page):
    """Option → the test that its row names."""
    text = page.read_text(encoding="utf-8")
    part = text.partition(HEADING)[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    found = ROW.findall(part)
    assert len(found) == len(rows), f"{page.name}: a row is | `options` | where they stand | `tests/FILE::TEST` |"
    for names, where, file, test in found:
        assert re.search(r"\b(section|table|figure|equation|appendix|algorithm)", where, re.IGNORECASE), names
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test
    return {name for names, *_ in found for name in re.findall(r"`(\w+)`", names)}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_option_is_set_somewhere_or_stands_in_a_paper(family):
    config_class = getattr(hf_hybrid_ssm, family.config)
    options = options_of(config_class)
    set_by_presets = options_of_presets(config_class)
    if family.model_type == "spade_seq2seq":  # its encoder is a stack of SPADE's
        set_by_presets |= options_of_presets(hf_hybrid_ssm.SpadeConfig)
    unset = options - set_by_presets - set_somewhere()
    assert len(options) > 15 and len(unset) < 10
    assert unset - listed_on(ROOT / f"docs/families/{family.folder}.md") == set(), (
        "set it in a recipe, or name its paper on the page, or remove it"
    )


def test_pages_list_only_what_nothing_sets():
    for page in (ROOT / "docs/families").glob("*.md"):
        configs = [getattr(hf_hybrid_ssm, family.config) for family in FAMILIES if family.folder == page.stem]
        options = set().union(*map(options_of, configs))
        in_use = set_somewhere().union(*map(options_of_presets, configs))
        assert listed_on(page) <= options - in_use, page.name


def test_an_option_that_nothing_sets_would_be_seen():
    assert "learning_rate" in set_somewhere() and "ssm_layers" in set_somewhere()
    assert "an_option_of_nobody" not in set_somewhere()
