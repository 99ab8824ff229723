"""The ladder of sizes and the loss by position: fits find known laws, curves known bends, and both recipes run."""

import json

import numpy as np
import pytest
from per_token_loss import PerTokenArguments, binned, flat_from, per_token_loss
from scaling_law import ScalingArguments, fit, scaling_law

from tests.recipes.small import QUIET, write_lines


def test_fit_finds_a_known_law():
    sizes = [1e4, 1e5, 1e6, 1e7]
    found = fit(sizes, [(n / 3e12) ** -0.07 for n in sizes])
    assert found["alpha"] == pytest.approx(0.07) and found["log_critical_size"] == pytest.approx(np.log(3e12))
    assert found["standard_error"] < 1e-8
    noisy = fit(sizes, [(n / 3e12) ** -0.07 * (1.01 if i % 2 else 0.99) for i, n in enumerate(sizes)])
    assert noisy["standard_error"] > 1e-4


def test_where_a_curve_turns_flat():
    positions = np.arange(1, 2048)
    bent = np.where(positions < 128, 6 - 0.2 * np.log2(positions), 6 - 0.2 * np.log2(128.0))
    assert 90 < flat_from(binned(bent)) < 260
    assert flat_from(binned(6 - 0.2 * np.log2(positions))) is None


def test_bins_hold_every_position_once():
    curve = binned(np.arange(100.0))
    assert curve["loss"][0] == 0 and curve["positions"][0] == 1
    assert sorted(curve["positions"]) == curve["positions"] and curve["loss"][-1] > 80


def test_ladder_and_curves_run(tmp_path):
    texts = [{"text": f"a short text about the number {number} and no more of it"} for number in range(60)]
    files = [write_lines(tmp_path / "texts.jsonl", texts)]
    base = QUIET | {"model_type": "longhorn", "train_files": files, "sequence_length": 16, "max_steps": 2}
    base |= {"tokenizer_vocab_size": 280}
    sizes = {str(n): {"config": {"hidden_size": n, "num_hidden_layers": 1, "state_size": 2}} for n in (8, 16, 32)}
    arguments = ScalingArguments(base, {"longhorn": sizes}, str(tmp_path / "runs"), [0, 1], str(tmp_path / "law"))
    figures = scaling_law(arguments)
    written = json.loads((tmp_path / "law.json").read_text())
    assert written | figures == written and (tmp_path / "law.png").stat().st_size > 0
    found = figures["families"]["longhorn"]
    counts = [member["parameters_beside_embeddings"] for member in found["members"].values()]
    assert counts == sorted(counts) and len(found["alphas_by_seed"]) == 2
    trained = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/*/model.safetensors")}
    assert len(trained) == 6 and scaling_law(arguments) == figures  # what is there is not trained again
    assert all(path.stat().st_mtime_ns == time for path, time in trained.items())

    folders = [str(tmp_path / "runs" / "longhorn" / f"32-{seed}") for seed in (0, 1)]
    options = {"files": files, "sequence_length": 16, "output_dir": str(tmp_path / "curves")}
    curves = per_token_loss(PerTokenArguments(models={"longhorn": folders}, **options))
    assert curves["models"]["longhorn"]["rows"] == 60 and 4 < curves["models"]["longhorn"]["mean_loss"] < 7
