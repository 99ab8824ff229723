"""What benchmarks/choosing.py counts, on small models: bytes that are kept, by formula; and whose call each row is."""

import json
import sys

import pytest
from _lib import provenance

from benchmarks import choosing, timing

WIDTH, DEPTH, WINDOW = 128, 4, 16


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"WIDTH": WIDTH, "DEPTH": DEPTH, "WINDOW": WINDOW, "VOCABULARY": 64, "TRAINED": 32, "READ": 128}
    for name, value in {**sizes, "WRITTEN": 2, "FAR": 1000}.items():
        monkeypatch.setattr(choosing, name, value)


# keys and values of each token; x of three tokens and 16 numbers for each of 2 width channels in 2 depth layers;
# a convolution's inputs and a state in two layers of three, a window's keys and values of one head in the third
BYTES = {
    "Llama": 4 * DEPTH * 2 * WIDTH * 1000,
    "Longhorn": 4 * 2 * DEPTH * 2 * WIDTH * (3 + 16),
    "RWKV-4": 4 * DEPTH * 5 * WIDTH,
}


@pytest.mark.parametrize("name", [*BYTES, "RecurrentGemma", "OLMo Hybrid", "BST SH"])
def test_figures(name):
    found = choosing.figures_of(name, rounds=1)
    assert found["kept_bytes"] == BYTES.get(name, found["kept_bytes"]) > 0
    found.pop("milliseconds_per_token")  # a difference of two times, which noise may turn round at this size
    assert min(found.values()) > 0


def test_each_model_keeps_the_call_that_measured_it(monkeypatch, tmp_path):
    """A later call adds its models; it says nothing about those of an earlier one."""
    monkeypatch.setattr(choosing, "RESULTS", tmp_path)
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    monkeypatch.setattr(choosing, "figures_of", lambda name, rounds: {"kept_bytes": rounds})
    for commit, names in {"1a2b": ["Llama", "xLSTM"], "3c4d": ["xLSTM"]}.items():
        monkeypatch.setattr(sys, "argv", ["benchmarks/choosing.py", "--models", *names])
        monkeypatch.setattr(provenance, "COMMIT", commit)
        choosing.main()
    found = json.loads((tmp_path / "choosing.json").read_text(encoding="utf-8"))
    assert found["commit"] == "1a2b, 3c4d"
    calls = {name: (each["commit"], each["command"].split("--models ")[1]) for name, each in found["models"].items()}
    assert calls == {"Llama": ("1a2b", "Llama xLSTM"), "xLSTM": ("3c4d", "xLSTM")}
