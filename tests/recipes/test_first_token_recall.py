"""First-token recall: rows tell their answer once, windows alone stay at guessing, and a sweep goes on."""

import json
from pathlib import Path

import first_token_recall as recipe
import numpy as np
import pytest
import yaml
from first_token_recall import RecallArguments, filled_rows, sweep, training_rows

from tests.recipes import small

MODELS = {
    "Llama": {"model_type": "llama", "num_attention_heads": 2, "intermediate_size": 32},
    "windows": {"model_type": "spade", "ssm_layers": [], "sliding_window": 2, "num_attention_heads": 2},
}
SMALL = {
    "config": {"hidden_size": 16, "num_hidden_layers": 1}, "answers": 2, "length": 12, "nearest": 4, "questions": 4,
    "distances": [6, 11, 20], "test_rows": 4, "learning_rates": [1e-5, 3e-2], "seeds": [0, 1],
}  # fmt: skip


def training(folder, steps=60):
    return small.training(folder, max_steps=steps, per_device_train_batch_size=4, logging_steps=10)


@pytest.mark.parametrize("fillers", [1, 5])
def test_rows_tell_the_answer_once_and_ask_for_it_later(fillers):
    arguments = RecallArguments(MODELS, answers=3, fillers=fillers, length=30, nearest=17, questions=6)
    rows = training_rows(arguments, 30, seed=0)
    for tokens, labels in zip(rows["input_ids"], rows["labels"]):
        asked = np.flatnonzero(tokens == arguments.vocab_size - 1)
        assert len(asked) == 6 and asked.min() >= 17 and asked.max() < 30
        assert (np.flatnonzero(labels != -100) == asked + 1).all() and set(labels[asked + 1]) == {tokens[0]}
        assert tokens[0] < 3 and (tokens[1:] >= 3).all() and (np.delete(tokens, asked)[1:] < 3 + fillers).all()
    for group in rows["input_ids"].reshape(-1, 3, 31):
        assert sorted(group[:, 0]) == [0, 1, 2] and (group[:, 1:] == group[:1, 1:]).all()
    assert not np.array_equal(rows["input_ids"], training_rows(arguments, 30, seed=1)["input_ids"])
    assert filled_rows(arguments, 9, 4, np.random.default_rng(0)).shape == (4, 9)


def test_attention_to_the_whole_row_learns_it_and_windows_do_not(tmp_path, monkeypatch):
    output = {"results": str(tmp_path / "shown"), "groups": {"both": list(MODELS)}}
    figures = sweep(RecallArguments(MODELS, **SMALL, **output), training(tmp_path / "runs"))
    found = {name: model["accuracy"] for name, model in figures["models"].items()}
    assert found["Llama"]["6"] == found["Llama"]["11"] == 1.0
    assert found["windows"]["6"] == found["windows"]["11"] == 0.5
    assert figures["models"]["Llama"]["learning_rate"] == 3e-2
    assert [run["seed"] for run in figures["models"]["Llama"]["runs"]] == [0, 1]
    assert json.loads((tmp_path / "shown.json").read_text())["models"] == figures["models"]
    assert (tmp_path / "shown.png").is_file()
    made = []
    monkeypatch.setattr(recipe, "run", lambda *given: made.append(given) or 1 / 0)
    again = sweep(RecallArguments(MODELS, **SMALL, only=["windows"]), training(tmp_path / "runs"))
    assert made == [] and again["models"] == {"windows": figures["models"]["windows"]}
    other = MODELS | {"windows": MODELS["windows"] | {"sliding_window": 3}}
    with pytest.raises(FileExistsError, match="windows"):
        sweep(RecallArguments(other, **SMALL), training(tmp_path / "runs"))


def test_a_batch_holds_every_answer_alike(tmp_path):
    with pytest.raises(ValueError, match="answers=3"):
        sweep(RecallArguments(MODELS, **SMALL | {"answers": 3}), training(tmp_path))


def test_the_committed_sweep_names_models_that_can_be_built():
    path = Path(__file__).parents[2] / "recipes/configs/recall/short.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    arguments = RecallArguments(settings["models"], groups=settings["groups"], config=settings["config"])
    for name, fields in arguments.models.items():
        given = {"vocab_size": arguments.vocab_size} | arguments.config | fields
        config = recipe.AutoConfig.for_model(**given)
        assert config.hidden_size == 64, name
        assert all(getattr(config, field) == value for field, value in fields.items() if field != "ssm_layers"), name


def test_a_panel_none_of_whose_models_ran_is_not_drawn():
    shares = {"accuracy": {"6": 1.0, "20": 0.5}, "half_width_of_95_percent": {"6": 0.0, "20": None}}
    settings = {"answers": 2, "length": 12, "distances": [6, 20]}
    figures = {"settings": settings, "models": {"Llama": shares}}
    figure = recipe.draw(figures, {"all tokens": ["Llama"], "a window": ["windows"]})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["all tokens"]
