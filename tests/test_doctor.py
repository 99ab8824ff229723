"""The doctor's report: every op, the backend it selects, reasons, and the error of each kernel."""

import json

from hf_hybrid_ssm import doctor
from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.ops._core.dispatch import REGISTRY


def test_every_op_is_examined_and_explained():
    found = doctor.examine()
    assert set(found["ops"]) >= {"longhorn_scan", "causal_conv", "local_attention", "legendre_memory"}
    for name, targets in found["ops"].items():
        for state in targets.values():
            assert state["backends"][state["selected"]] == "runs"
            assert set(state["kernel_errors"]) <= set(REGISTRY[name].kernels)
            assert all(error < 0.05 for error in state["kernel_errors"].values())
    scan = found["ops"]["longhorn_scan"]["cpu float32"]
    if found["compiler"]:
        assert scan["selected"] == "native" and scan["kernel_errors"]["native"] < 1e-5
    assert scan["backends"]["triton"] != "runs"


def test_report_names_what_is_not_selected_and_why(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "longhorn_scan" in text and "not triton:" in text and "transformers 5." in text


def test_json(capsys):
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ops"]["longhorn_scan"]["cpu float32"]["backends"]["torch"] == "runs"
