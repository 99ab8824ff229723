"""The committed students of a real teacher hold what their pages say."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hf_hybrid_ssm.hub.configurations import config_of_folder

ROOT = Path(__file__).parents[2] / "checkpoints/deltas"
FOLDERS = sorted(path.parent for path in ROOT.glob("*/delta.json"))

named = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@named
def test_it_holds_the_sinks_of_its_windows_alone(folder):
    config, tensors = config_of_folder(folder), load_file(folder / "delta.safetensors")
    layers = {index: layer for index, layer in enumerate(config.plan.layers) if layer.attention != "full"}
    sinks = {f"model.layers.{index}.self_attn.sink.{part}" for index in layers for part in ("key", "value")}
    assert set(tensors) == sinks
    for index, layer in layers.items():
        windowed = config.num_key_value_heads - len(layer.groups)
        assert tensors[f"model.layers.{index}.self_attn.sink.key"].shape == (windowed, config.head_dim)


@named
def test_its_card_has_what_was_measured(folder):
    """Losses of a training, or the tables of one that was not trained."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    if "tables" not in results:
        assert results["teacher_loss"] < results["validation_loss"] < results["loss_before_training"]
        for name in ("teacher_loss", "validation_loss", "loss_before_training"):
            assert f"| {name.replace('_', ' ')} | {results[name]:.3f} |" in card
    for table in results.get("tables", []):
        assert table["title"] in card and len(table["rows"]) == 2
        for row in table["rows"]:
            assert re.search(r" *\| *".join(map(re.escape, row)), card), row
