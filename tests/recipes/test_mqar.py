"""Associative recall: rows are as the benchmark defines them, and a model's accuracy is counted at queries only."""

import json

import numpy as np
import pytest
from mqar import MqarArguments, accuracy, best_trial, data_of, groups, recall_rows, sweep
from transformers import EvalPrediction

from tests.recipes.small import training


def test_rows_ask_for_what_they_told():
    rows = recall_rows(64, 8, rows=50, vocab_size=100, seed=0)
    for tokens, labels in zip(rows["input_ids"], rows["labels"]):
        assert tokens.shape == labels.shape == (65,)
        told = dict(zip(tokens[:16:2], tokens[1:16:2]))
        assert len(told) == 8 and min(told) >= 1 and max(told) < 50 <= min(told.values())
        asked = np.flatnonzero(labels != -100) - 1
        assert len(asked) == 8 and asked.min() >= 16 and (asked % 2 == 0).all()
        assert {tokens[place]: labels[place + 1] for place in asked} == told
        assert (np.delete(tokens[16:], asked - 16) == 0).all()


def test_near_queries_are_more_frequent_and_seeds_differ():
    places = []
    for row in recall_rows(256, 4, rows=200, vocab_size=64, seed=1)["labels"]:
        places.extend(np.flatnonzero(row != -100))
    assert np.median(places) < 80
    assert not np.array_equal(
        recall_rows(32, 2, 5, 64, seed=0)["input_ids"], recall_rows(32, 2, 5, 64, seed=1)["input_ids"]
    )


def test_accuracy_counts_queries():
    labels = np.array([[-100, -100, 7, -100, 9]])
    predictions = np.array([[1, 7, 3, 8, 0]])
    assert accuracy(EvalPrediction(predictions, labels)) == {"accuracy": 0.5}


def test_sweep_writes_the_best(tmp_path):
    tiny = {"num_hidden_layers": 1, "state_size": 4}
    arguments = MqarArguments(
        {"longhorn": {"model_type": "longhorn", **tiny}},
        settings=[[16, 2]],
        widths=[8],
        learning_rates=[1e-5, 1e-2],
        seeds=[1, 2],
        vocab_size=16,
        train_rows=64,
        test_rows=16,
    )
    (best,) = sweep(arguments, training(tmp_path, num_train_epochs=2, eval_strategy="epoch"))
    runs = best["runs"]
    trial = max(runs[:2], key=lambda run: run["accuracy"])["trial"]
    rate = trial["learning_rate"]
    assert [(run["trial"], run["seed"]) for run in runs] == [
        ({"learning_rate": 1e-5}, 1),
        ({"learning_rate": 1e-2}, 1),
        ({"learning_rate": rate}, 2),
    ]
    at_best = [run["accuracy"] for run in runs if run["trial"] == trial]
    assert best["trial"] == trial and best["accuracy"] == sum(at_best) / 2
    assert best["accuracy_by_pairs"]["2"] <= best["accuracy"] and best["pairs"] == [2]
    assert json.loads((tmp_path / "results.json").read_text())["best"] == [best]
    assert (tmp_path / "accuracy.png").exists()


def test_mixed_settings_share_a_model():
    models = {"a": {"model_type": "longhorn"}}
    arguments = MqarArguments(
        models, settings=[[32, 2], [64, 4], [32, 4]], vocab_size=16, train_rows=20, test_rows=8, mixed=True
    )
    assert groups(arguments) == [(32, [2, 4]), (64, [4])]
    arguments.mixed = False
    assert groups(arguments) == [(32, [2]), (64, [4]), (32, [4])]
    train, test = data_of(32, [2, 4], arguments)

    def asked(rows):
        return [int((row["labels"] != -100).sum()) for row in rows]

    assert sorted(asked(train)) == [2] * 10 + [4] * 10
    assert {pairs: asked(rows) for pairs, rows in test.items()} == {2: [2] * 4, 4: [4] * 4}


def test_the_first_seed_finds_rate_and_options():
    """What comes after one that is enough is not tried, and other seeds see the best one only."""
    asked = []

    def one(trial, seed):
        asked.append((trial, seed))
        share = {0.1: 0.3, 0.2: 0.9}[trial["learning_rate"]] + 0.09 * (trial.get("warmup_steps") == 9)
        share -= 0.2 * (seed == 6)
        return {"accuracy": share, "accuracy_by_pairs": {"2": share}, "epochs": seed, "parameters": 1}

    arguments = MqarArguments(
        {"a": {"model_type": "longhorn"}},
        learning_rates=[0.1, 0.2],
        options=[{}, {"warmup_steps": 9}, {"warmup_steps": 99}],
        seeds=[5, 6],
    )
    found = best_trial(one, arguments)
    plain = [({"learning_rate": rate}, 5) for rate in (0.1, 0.2)]
    warm = [{"learning_rate": rate, "warmup_steps": 9} for rate in (0.1, 0.2)]
    assert asked == [*plain, (warm[0], 5), (warm[1], 5), (warm[1], 6)]
    assert found["accuracy"] == found["accuracy_by_pairs"]["2"] == pytest.approx(0.89)
    assert (found["trial"], found["epochs"]) == (warm[1], 6)


@pytest.mark.parametrize(("enough", "trial", "runs"), [(0.99, 0.2, 5), (0.9, 0.3, 4)])
def test_finalists_are_ranked_by_their_mean(enough, trial, runs):
    """What the first seed ranks first may fail with the second; what is enough is not set against others."""
    shares = {(0.1, 5): 0.1, (0.2, 5): 0.8, (0.3, 5): 0.9, (0.2, 6): 0.7, (0.3, 6): 0.0}

    def one(trial, seed):
        share = shares[trial["learning_rate"], seed]
        return {"accuracy": share, "accuracy_by_pairs": {"2": share}, "epochs": 1, "parameters": 1}

    arguments = MqarArguments(
        {"a": {"model_type": "longhorn"}}, learning_rates=[0.1, 0.2, 0.3], seeds=[5, 6], finalists=2, enough=enough
    )
    found = best_trial(one, arguments)
    assert found["trial"] == {"learning_rate": trial} and len(found["runs"]) == runs
    assert found["accuracy"] == pytest.approx((shares[trial, 5] + shares[trial, 6]) / 2)
