"""The folder of Triton kernels: what it holds, and that exported checkpoints use it where there is one."""

import ast
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from hf_hybrid_ssm.hub import export_kernels
from hf_hybrid_ssm.hub.kernels import HEAD, code_of_kernels
from tests import processes
from tests.tiny_models import build

SCRIPT = Path(__file__).parent / "with_kernels.py"
VARIANTS = {"longhorn": "longhorn", "bst": "bst mf unstructured"}
KERNELS = {"longhorn": ["causal_conv", "longhorn_scan"], "bst": ["long_conv"]}
STAND_IN = """
import torch


def supports(device_type, dtype):
    return None if dtype == torch.float32 else "it takes float32"


def causal_conv_triton(inputs):
    x, weight, bias, state, *_ = inputs
    taps = weight.shape[1]
    past = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if state is None else state
    padded = torch.cat([past, x], 1)
    y = sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(taps)) + (0 if bias is None else bias)
    return (torch.nn.functional.silu(y) if inputs.silu else y), padded[:, x.shape[1] :]
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for name, variant in VARIANTS.items():
        build(variant, f"{name.capitalize()}ForCausalLM").save_pretrained(root / name, export_code=True)
    return [root / name for name in VARIANTS]


def answers(tmp_path, checkpoints, path=(), **environment):
    """Of a process without this package, with folders on its path."""
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    search = os.pathsep.join([*map(str, path), *own])
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": search} | environment
    command = [sys.executable, SCRIPT, tmp_path / "found", *checkpoints]
    ran = processes.run(command, env=environment, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    return torch.load(tmp_path / "found", weights_only=True)


@pytest.fixture(scope="module")
def plain(checkpoints, tmp_path_factory):
    return answers(tmp_path_factory.mktemp("plain"), checkpoints)


def assert_same_numbers(got, want):
    torch.testing.assert_close(got["logits"], want["logits"], rtol=1e-4, atol=2e-6)
    assert got["gradients"].keys() == want["gradients"].keys()
    for name, gradient in want["gradients"].items():
        torch.testing.assert_close(got["gradients"][name], gradient, rtol=1e-3, atol=1e-5)


def test_plain_torch_where_there_are_none(plain):
    for name, ops in KERNELS.items():
        assert {op: plain[name]["selected"][op] for op in ops} == {op: f"{op}_torch" for op in ops}


def test_kernels_on_the_path_are_taken(checkpoints, plain, tmp_path):
    """A stand-in for one kernel: the others are missing, and plain torch runs for them."""
    package = tmp_path / "site" / "hf_hybrid_ssm_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "causal_conv_triton.py").write_text(STAND_IN)
    found = answers(tmp_path, checkpoints, [package.parent])["longhorn"]
    assert found["selected"]["causal_conv"] == "causal_conv_triton"
    assert found["selected"]["longhorn_scan"] == "longhorn_scan_torch"
    assert_same_numbers(found, plain["longhorn"])


def test_a_kernel_that_computes_something_else_is_not_used(checkpoints, plain, tmp_path):
    package = tmp_path / "site" / "hf_hybrid_ssm_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "causal_conv_triton.py").write_text(STAND_IN.replace("+ (0 if bias is None else bias)", ""))
    found = answers(tmp_path, checkpoints[:1], [package.parent])["longhorn"]
    assert found["selected"]["causal_conv"] == "causal_conv_torch"
    assert torch.equal(found["logits"], plain["longhorn"]["logits"])


@pytest.mark.parametrize("loaded_by", ["path", "kernels"])
def test_the_kernels_themselves(checkpoints, plain, tmp_path, loaded_by):
    """In Triton's interpreter: found on the path, or loaded by the `kernels` library."""
    pytest.importorskip("triton", minversion="3.6")
    folder = export_kernels(tmp_path / "kernels")
    where = {"path": [folder / "build" / "torch-universal"]}
    if loaded_by == "kernels":
        pytest.importorskip("kernels", minversion="0.17")
        where = {"KERNELS_FOLDER": str(folder)}
    found = answers(tmp_path, checkpoints, TRITON_INTERPRET="1", **where)
    for name, ops in KERNELS.items():
        assert {op: found[name]["selected"][op] for op in ops} == {op: f"{op}_triton" for op in ops}
        assert_same_numbers(found[name], plain[name])


def test_the_folder(tmp_path):
    folder = export_kernels(tmp_path / "kernels")
    variant = folder / "build" / "torch-universal"
    before = {path: path.read_bytes() for path in variant.rglob("*") if path.is_file()}
    (variant / "hf_hybrid_ssm_kernels" / "earlier.py").write_text(HEAD)
    export_kernels(folder)
    assert {path: path.read_bytes() for path in variant.rglob("*") if path.is_file()} == before
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "hf-hybrid-ssm-kernels" and metadata["backend"] == {"type": "cuda"}
    (variant / "hf_hybrid_ssm_kernels" / "mine.py").write_text("# mine\n")
    with pytest.raises(ValueError, match=r"mine\.py was not written by export_kernels"):
        export_kernels(folder)
    assert {path: path.read_bytes() for path in before} == before


def test_code_needs_torch_and_triton_alone():
    texts = code_of_kernels()
    assert {f"{op}_triton.py" for ops in KERNELS.values() for op in ops} <= texts.keys()
    for text in texts.values():
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in texts
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                packages = {name.split(".")[0] for name in names} - sys.stdlib_module_names
                assert packages <= {"torch", "triton"}
