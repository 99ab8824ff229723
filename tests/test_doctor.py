"""The doctor's report: every op, the backend it selects, reasons, and the error of each kernel."""

import json

from hf_hybrid_ssm import doctor
from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.ops.core import native_build
from hf_hybrid_ssm.ops.core.dispatch import REGISTRY
from hf_hybrid_ssm.ops.core.native_library import missing_compiler


def test_every_op_is_examined_and_explained():
    found = doctor.examine()
    assert set(found["ops"]) >= {"longhorn_scan", "causal_conv", "local_attention", "legendre_memory"}
    for name, targets in found["ops"].items():
        for state in targets.values():
            assert state["backends"][state["selected"]] == "runs"
            assert set(state["kernel_errors"]) <= set(REGISTRY[name].kernels)
            assert all(error < 0.05 for error in state["kernel_errors"].values())
    scan = found["ops"]["longhorn_scan"]["cpu float32"]
    assert (found["cpu_kernels"] is None) == (missing_compiler() is not None)
    if found["cpu_kernels"]:
        assert scan["selected"] == "native" and scan["kernel_errors"]["native"] < 1e-5
    assert scan["backends"]["triton"] != "runs"


def test_report_names_what_is_not_selected_and_why(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "longhorn_scan" in text and "not triton:" in text and "transformers 5." in text


def test_json(capsys):
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ops"]["longhorn_scan"]["cpu float32"]["backends"]["torch"] == "runs"


def test_kernels_that_came_with_the_package_are_named(tmp_path, monkeypatch):
    folder = tmp_path / native_build.instruction_sets.in_use()
    folder.mkdir()
    monkeypatch.setattr(native_build, "SHIPPED", tmp_path)
    monkeypatch.setattr(native_build, "_compiler", lambda: ("/usr/bin/cc",))
    assert native_build.origin() == "compiled by /usr/bin/cc"  # what is in the folder was made of other sources
    sources = list(native_build.INCLUDES.parent.glob("*/native*.c"))
    assert len(sources) > 5
    for source in sources:
        (folder / native_build.shipped_name(source)).touch()
    assert native_build.origin() == f"shipped for {folder.name}"
    monkeypatch.setattr(native_build, "missing_compiler", lambda: "no C compiler was found")
    assert native_build.origin() is None
