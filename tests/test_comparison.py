"""A slice of `benchmarks/comparison.py`: the outcomes on its page are those of the installed transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks import comparison

ROOT = Path(__file__).parents[1]
FIGURES = json.loads((ROOT / "benchmarks/results/comparison.json").read_text(encoding="utf-8"))
IN_THIS_TEST = {  # a peer's model and a check each, besides ours
    "Mamba": "prefill in chunks",
    "Mamba-2": "packing, by `position_ids`",
    "Jamba": "packing, by all that the collator gives",
    "Bamba": "rollback by `crop`",
    "Falcon-H1": "prompt lookup",
    "Qwen3-Next": "packing, by all that the collator gives",
    "Llama": "rollback by `crop`",
    "Qwen3.5": "rollback by `crop`",
    "OLMo Hybrid": "packing, by `position_ids`",
    "Kimi Linear": "token by token",
    "Ling 3": "rollback by `crop`",
    "Nemotron-H": "token by token",
    "Granite 4.0 H": "prompt lookup",
}


def test_the_figures_are_of_all_models_and_checks():
    assert list(FIGURES["models"]) == list(comparison.MODELS) and FIGURES["tolerance"] == comparison.TOLERANCE
    for found in FIGURES["models"].values():
        assert list(found["checks"]) == list(comparison.CHECKS)


def test_a_wrong_state_would_be_seen():
    dropped = {name: found["state_dropped"] for name, found in FIGURES["models"].items()}
    assert dropped.pop("Llama") < FIGURES["tolerance"]
    assert min(dropped.values()) > 10 * FIGURES["tolerance"]


@pytest.mark.parametrize("name", comparison.OURS)
def test_ours_are_the_same_in_every_check(name):
    model = comparison.build(name)
    assert comparison.state_dropped(model) > 10 * comparison.TOLERANCE
    assert FIGURES["models"][name]["checks"].keys() == comparison.CHECKS.keys()
    for check in comparison.CHECKS:
        assert comparison.outcome(model, check)["outcome"] == "same", check
        assert FIGURES["models"][name]["checks"][check]["outcome"] == "same", check


@pytest.mark.parametrize("name, check", IN_THIS_TEST.items())
@pytest.mark.skipif(
    FIGURES["machine"]["transformers"] != transformers.__version__, reason="the figures are of another transformers"
)
def test_peers_answer_as_on_the_page(name, check):
    torch.manual_seed(0)
    expected = FIGURES["models"][name]["checks"][check]
    found = comparison.outcome(comparison.build(name), check)
    assert found["outcome"] == expected["outcome"] and found.get("error") == expected.get("error")
