"""Comparisons: settings are merged, every seed of every variant runs, and what is written is what was measured."""

import json
import statistics
from pathlib import Path

import compare as compare_module
import pytest
import torch
from _lib.settings import read_settings
from compare import CompareArguments, compare, merged
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.hub.configurations import new_config
from tests.recipes.small import QUIET, write_lines


def test_merging_goes_into_mappings_and_changes_nothing():
    base = {"a": 1, "config": {"x": 1, "y": [1, 2]}}
    assert merged(base, {"config": {"y": [3]}, "b": 2}) == {"a": 1, "b": 2, "config": {"x": 1, "y": [3]}}
    assert base == {"a": 1, "config": {"x": 1, "y": [1, 2]}}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    texts = [{"text": f"a short text about the number {number} and no more"} for number in range(60)]
    base = {
        "model_type": "longhorn", "config": {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 2},
        "train_files": [write_lines(folder / "texts.jsonl", texts)], "sequence_length": 32, "max_steps": 2,
        "tokenizer_vocab_size": 280, "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    return {"base": QUIET | base, "variants": {"narrow": {}, "wide": {"config": {"hidden_size": 16}}}, "seeds": [0, 1]}


def test_runs_and_summary(settings, tmp_path):
    output = {"output_dir": str(tmp_path / "runs"), "results": str(tmp_path / "results.json"), "reference": "narrow"}
    arguments = CompareArguments(**settings, **output)
    figures = compare(arguments)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written | figures == written and (tmp_path / "results.png").is_file()
    for found in figures["models"].values():
        losses = [run["validation_loss"] for run in found["runs"]]
        assert [run["seed"] for run in found["runs"]] == [0, 1] and losses[0] != losses[1]
        assert found["validation_loss"] == pytest.approx(statistics.mean(losses))
        assert [point["tokens"] for point in found["runs"][0]["curve"]] == [256, 512]
    assert figures["models"]["wide"]["parameters"] > figures["models"]["narrow"]["parameters"]
    pairs = [
        wide["validation_loss"] - narrow["validation_loss"]
        for narrow, wide in zip(*(figures["models"][name]["runs"] for name in ("narrow", "wide")))
    ]
    difference = figures["differences"]["wide"]
    assert figures["token_efficiency"] == {}  # two evaluations on the way are too few
    assert difference["mean"] == pytest.approx(statistics.mean(pairs))
    assert difference["half_width_of_95_percent"] == pytest.approx(12.706 * abs(pairs[0] - pairs[1]) / 2, rel=1e-4)


def test_a_killed_comparison_goes_on_with_the_runs_it_lacks(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HYBRID_SSM_DATA", str(Path(settings["base"]["train_files"][0]).parent))
    arguments = CompareArguments(**settings, output_dir=str(tmp_path))
    figures = compare(arguments)
    missing = tmp_path / "wide-1" / "results.json"
    missing.unlink()
    made = []
    pretrain = compare_module.pretrain
    monkeypatch.setattr(
        compare_module, "pretrain", lambda *given: made.append(given[2].output_dir) or pretrain(*given)
    )
    again = compare(arguments)
    assert made == [str(missing.parent)]
    assert again["models"]["wide"]["validation_loss"] == figures["models"]["wide"]["validation_loss"]
    one = compare(CompareArguments(**settings, output_dir=str(tmp_path), only=["wide"]))
    assert one["models"] == {"wide": again["models"]["wide"]} and made == [str(missing.parent)]
    other = CompareArguments(settings["base"] | {"max_steps": 1}, settings["variants"], str(tmp_path))
    with pytest.raises(FileExistsError, match="output_dir"):
        compare(other)


def test_each_variant_trains_at_its_best_learning_rate(settings, tmp_path, monkeypatch):
    rates = {}
    pretrain = compare_module.pretrain

    def noted(*given):
        rates[Path(given[2].output_dir).name] = (given[2].learning_rate, given[2].max_steps)
        return pretrain(*given)

    monkeypatch.setattr(compare_module, "pretrain", noted)
    arguments = CompareArguments(
        **settings | {"seeds": [0]}, output_dir=str(tmp_path), learning_rates=[1e-9, 1e-2], search_steps=1
    )
    assert all(losses["0.01"] < losses["1e-09"] for losses in compare(arguments)["learning_rates"].values())
    assert rates["wide-0"] == rates["narrow-0"] == (1e-2, 2) and rates["wide-rate-1e-09"] == (1e-9, 1)


def test_a_search_on_whole_runs_makes_those_of_the_first_seed(settings, tmp_path, monkeypatch):
    made = []
    pretrain = compare_module.pretrain
    monkeypatch.setattr(compare_module, "pretrain", lambda *given: made.append(given[2]) or pretrain(*given))
    arguments = CompareArguments(
        **settings | {"seeds": [0, 1]}, output_dir=str(tmp_path), learning_rates=[1e-9, 1e-2], search_steps=2
    )
    figures = compare(arguments)
    for name, found in figures["models"].items():
        assert [run["seed"] for run in found["runs"]] == [0, 1]
        assert found["runs"][0]["validation_loss"] == figures["learning_rates"][name]["0.01"]
    found = sorted((Path(training.output_dir).name, training.seed) for training in made)
    searched = [(f"{name}-rate-{rate}", 0) for name in ("narrow", "wide") for rate in ("0.01", "1e-09")]
    assert found == sorted([*searched, ("narrow-1", 1), ("wide-1", 1)])


def test_a_difference_is_to_the_reference_that_a_variant_names():
    runs = {
        name: [{"seed": seed, "validation_loss": loss * (1 + seed)} for seed in (0, 1)]
        for name, loss in {"a": 1.0, "b": 2.0, "b and more": 5.0, "c": 4.0}.items()
    }
    found = compare_module.differences(runs, "a", {"b and more": "b"})
    assert {name: one["mean"] for name, one in found.items()} == {"b and more": 4.5, "c": 4.5}
    assert set(compare_module.differences(runs, "a")) == {"b", "b and more", "c"}


@pytest.mark.parametrize(
    "given",
    [
        {"references": {"wide": "narrow"}},
        {"reference": "narrow", "references": {"wide": "other"}},
        {"reference": "narrow", "references": {"narrow": "wide"}},
        {"reference": "narrow", "references": {"other": "wide"}, "only": ["narrow", "other"]},
    ],
)
def test_references_that_say_nothing_are_refused(given):
    with pytest.raises(ValueError, match="references"):
        names = ("narrow", "wide", "other")[: 2 + ("only" in given)]
        CompareArguments({}, {name: {} for name in names}, **given)


def test_references_of_variants_that_do_not_run_are_not_asked_for():
    given = {"reference": "narrow", "references": {"other": "wide"}, "only": ["narrow", "some"]}
    CompareArguments({}, {name: {} for name in ("narrow", "wide", "other", "some")}, **given)


CONFIGS = Path(__file__).parents[2] / "recipes/configs/compare"
PARTS = {  # what adds parts to a stack, which it names
    "spade_books": 1.45, "spade_windows": 1.45, "spade_layers": 1.55, "bst_layers": 1.4, "bst_states": 1.4,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_committed_comparisons_are_of_models_of_equal_size(name, monkeypatch):
    """Every variant can be built, has all its fields, and is within 12 % of the others without embeddings (SSMs add to
    their baselines), but for those of `PARTS`."""
    monkeypatch.setenv("HF_HYBRID_SSM_DATA", "data")
    (arguments,) = read_settings("compare.py", (CompareArguments,), [str(CONFIGS / f"{name}.yaml")])
    sizes = {}
    for variant, over in arguments.variants.items():
        settings = merged(arguments.base, over)
        fields = settings.get("config", {})
        config = new_config(settings["model_type"], settings.get("preset"), vocab_size=4096, **fields)
        assert all(getattr(config, key) == value for key, value in fields.items()), variant
        with torch.device("meta"):
            sizes[variant] = AutoModelForCausalLM.from_config(config).num_parameters(exclude_embeddings=True)
    assert max(sizes.values()) <= PARTS.get(name, 1.12) * min(sizes.values()), sizes
