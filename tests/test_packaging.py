"""The dependency rule (which level may import what), and the cost of an import."""

import ast
import json
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_hybrid_ssm
from tests import processes

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "hf_hybrid_ssm"
FILES = sorted(PACKAGE.rglob("*.py"))
OPTIONAL = {"triton", "datasets", "lm_eval", "peft", "matplotlib", "evaluate"}


def imported_modules(path, top_level_only=False):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_down_only(path):
    where = path.relative_to(PACKAGE).parts
    level, family = where[0], where[1] if len(where) > 2 else None
    below = {"ops": {"ops"}, "layers": {"ops", "layers", "lazy"}}
    below["models"] = below["layers"] | {"models"}
    for module in imported_modules(path):
        top, *rest = module.split(".")
        if level in ("ops", "layers"):
            assert top != "transformers", f"{path} imports {module}"
        if top == "hf_hybrid_ssm" and level in below:
            assert rest and rest[0] in below[level], f"{path} imports {module} from a level above"
            if rest[0] == "models" and len(rest) > 2 and family is not None:
                assert rest[1] == family, f"{path} imports {module} of another family"


def modules_used(path):
    """All that a file imports: at its top, within functions, and by a name in `import_module`."""
    ours = {name_of(file) for file in FILES}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & ours
            if names - ours:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))


def name_of(path):
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def test_no_modules_import_each_other():
    """Not even within functions. The package itself stays out, which every module of it imports first."""
    used = {
        name_of(path): {name for name in modules_used(path) if name.startswith("hf_hybrid_ssm.")} for path in FILES
    }
    graph = {name: others - {name} for name, others in used.items() if name != "hf_hybrid_ssm"}
    assert graph["hf_hybrid_ssm.auto"] >= {"hf_hybrid_ssm.models", "hf_hybrid_ssm.hub.export"}
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES) - 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_optional_packages_are_guarded(path):
    if path.name.startswith("triton"):  # imported on first use alone
        return
    tops = {module.split(".")[0] for module in imported_modules(path, top_level_only=True)}
    assert not tops & OPTIONAL


def started(code):
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE)})
    return json.loads(run.stdout)


def fresh(code):
    """Where torch is imported already, and nothing of transformers."""
    first = "import sys; assert not any(name.split('.')[0] == 'transformers' for name in sys.modules)\n"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", first + code]
    return json.loads(processes.run(command, env=environment, check=True, with_transformers=False).stdout)


def test_import_is_cheap():
    code = """
import json, sys, time
import transformers
before = set(sys.modules)
begin = time.perf_counter()
import hf_hybrid_ssm
print(json.dumps({"seconds": time.perf_counter() - begin, "new": sorted(set(sys.modules) - before)}))
"""
    runs = [started(code) for _ in range(3)]
    assert min(run["seconds"] for run in runs) < 0.3
    new = {name.split(".")[0] for name in runs[0]["new"]}
    assert not new & (OPTIONAL | {"torch"})


def test_import_leaves_ops_and_models_for_their_first_use():
    code = """
import json, sys
from transformers import AutoModelForCausalLM, PreTrainedModel
import hf_hybrid_ssm
print(json.dumps([name for name in sys.modules if name.startswith("hf_hybrid_ssm.")]))
"""
    # what cannot wait: the tables of families, and the quantizer, which transformers looks up
    early = set(fresh(code))
    assert "hf_hybrid_ssm.precision" in early
    assert not {name for name in early if ".ops." in name or "modeling_" in name or "configuration" in name}


EARLY = ["transformers", "transformers.cache_utils", "transformers.models.auto.modeling_auto"]


@pytest.mark.parametrize("first", ["hf_hybrid_ssm", *EARLY])
def test_registration_in_any_order(first):
    code = f"""
import json, importlib
importlib.import_module({first!r})
import hf_hybrid_ssm, transformers
importlib.reload(hf_hybrid_ssm)
from transformers import AutoConfig, AutoModelForCausalLM
small = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=2)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", **small))
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names
from hf_hybrid_ssm.models.configuration import HOOKS
print(json.dumps([type(model).__name__, names["longhorn"], None not in vars(HOOKS).values()]))
"""
    assert fresh(code) == ["LonghornForCausalLM", "LonghornForCausalLM", True]


@pytest.mark.parametrize("first", ["hf_hybrid_ssm", "transformers.cache_utils", "hf_hybrid_ssm.models.packing"])
def test_a_cache_is_made_before_any_model(first):
    code = f"""
import json, importlib
importlib.import_module({first!r})
import hf_hybrid_ssm
from transformers import AutoConfig, DynamicCache
config = AutoConfig.for_model("longhorn", vocab_size=8, hidden_size=8, num_hidden_layers=2)
print(json.dumps([type(layer).__name__ for layer in DynamicCache(config=config).layers]))
"""
    assert fresh(code) == ["RecurrentStateLayer", "RecurrentStateLayer"]


def test_configurations_and_models_name_their_copyright():
    """transformers' test of initial values reads the year from a configuration's file, and passes over one without."""
    files = [path for path in FILES if path.name.startswith(("configuration_", "modeling_"))]
    assert len(files) >= 9
    for path in files:
        first, second = path.read_text(encoding="utf-8").splitlines()[:2]
        assert first == "# Copyright 2026 The hf-hybrid-ssm contributors.", path
        assert second.startswith("# Licensed under the Apache License, Version 2.0"), path


def test_public_names_exist():
    for name in hf_hybrid_ssm.__all__:
        assert getattr(hf_hybrid_ssm, name) is not None


@pytest.mark.parametrize("name", ["PreTrainedModel", "AutoModelForCausalLM", "quantizers", "cache_utils"])
def test_any_name_of_transformers_may_come_first(name):
    """What waits for a module of transformers to be imported must not need one that is on its way to it."""
    code = f"import hf_hybrid_ssm; from transformers import {name}; from hf_hybrid_ssm import LonghornForCausalLM"
    done = processes.run([sys.executable, "-c", code], with_transformers=False)
    assert done.returncode == 0, done.stderr
