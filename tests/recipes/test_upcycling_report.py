"""The report: every judge is asked once, a stopped report goes on, and windows that hold a text change nothing."""

import json

import pytest
import torch
import upcycling_report
from _lib.documents import train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from upcycling_report import ReportArguments, report

from hf_hybrid_ssm.evaluation.recall_tasks import words
from tests.recipes.small import write_lines

WINDOW = 128
LONG = 512


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    tokenizer = train_tokenizer([" ".join((*words.NAMES, *words.WHAT, *words.DID, *words.WHO))], 1500)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=LONG, initializer_range=0.4, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    rows = [{"text": " ".join(words.NAMES * 6)}, {"text": "short"}, {"text": " ".join(words.THINGS * 6)}]
    write_lines(folder / "texts.jsonl", rows)
    return folder


def arguments_of(place, output, **options):
    students = {"wide": {"keep": 0}, "even": {"keep": 1, "keep_by": "even"}, "made": {"keep": 1.0}}
    given = {
        "students": students | {"groups": {"keep": [[1, 0]], "sink": "constant"}, "long": {"keep": 0, "window": 250}},
        "multiples": [2],
        "samples": 3,
        "edges": [8, 64, 200],
        "texts": 2,
    }
    given |= {"files": [str(place / "texts.jsonl")], "written_tokens": 5, "cache_lengths": [64, 128]}
    return ReportArguments(str(place / "teacher"), window=WINDOW, output_dir=str(output), **given | options)


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    output = tmp_path_factory.mktemp("out") / "report"
    return output, report(arguments_of(place, output))


def test_a_window_that_keeps_every_layer_changes_nothing(whole):
    models = whole[1]["models"]
    assert set(models) == {"teacher", "wide", "even", "made", "groups", "long"}
    assert models["made"]["recall"] == models["teacher"]["recall"]
    for part, loss in models["teacher"]["loss"]["mean"].items():
        for other in ("made", "long"):
            assert models[other]["loss"]["mean"][part] == pytest.approx(loss, abs=1e-4)
    assert models["wide"]["loss"]["mean"]["8-64"] == pytest.approx(models["teacher"]["loss"]["mean"]["8-64"], abs=1e-4)
    assert models["wide"]["loss"]["mean"]["64-200"] != pytest.approx(
        models["teacher"]["loss"]["mean"]["64-200"], abs=1e-3
    )
    assert models["even"]["layers"] == [1] and models["wide"]["layers"] == []


def test_every_judge_is_asked(whole):
    output, found = whole
    needle = found["models"]["teacher"]["recall"]["recall_needle"]["2x"]
    assert needle["count"] == 3 and 0 <= needle["interval"][0] <= needle["right"] / 3 <= needle["interval"][1] <= 1
    assert len(found["models"]["teacher"]["loss"]["by_text"]) == 2
    # keys and values of 3 layers, 2 heads of 16, in bfloat16
    assert found["models"]["teacher"]["cache_bytes"] == {"64": 64 * 3 * 2 * 32 * 2, "128": 128 * 3 * 2 * 32 * 2}
    held = found["models"]["groups"]["cache_bytes"]  # one group of six grows, the others have the report's window
    assert held["128"] - held["64"] == 64 * 2 * 16 * 2 and held["64"] < 2 * 16 * 2 * (64 + 5 * (WINDOW + 1))
    assert found["models"]["made"]["written"] == found["models"]["teacher"]["written"]
    assert found["models"]["made"]["written"]["tokens"] == 10
    assert json.loads((output / "results.json").read_text())["models"]["made"] == found["models"]["made"]


def test_a_stopped_report_goes_on(whole, place, monkeypatch):
    output, found = whole
    (output / "even-loss.json").unlink()
    asked = []
    loss = upcycling_report.loss_by_position
    monkeypatch.setattr(upcycling_report, "loss_by_position", lambda *a, **k: asked.append(1) or loss(*a, **k))
    monkeypatch.setattr(upcycling_report, "evaluate", None)
    assert report(arguments_of(place, output)) == found
    assert len(asked) == 2 and found["models"]["made"]["layers"] == [0, 1, 2]
    monkeypatch.setattr(upcycling_report, "choose_layers", None)  # what was chosen is not chosen again
    assert report(arguments_of(place, output)) == found
    with pytest.raises(FileExistsError):
        report(arguments_of(place, output, samples=4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": ["piqa"]}, "piqa"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"students": {"teacher": {"keep": 1}}}, "'teacher' is the name of the model they are made of"),
    ],
)
def test_refusals(options, words, place, tmp_path):
    with pytest.raises(ValueError, match=words):
        arguments_of(place, tmp_path, **options)


def test_texts_that_are_too_short_are_counted(place, tmp_path):
    with pytest.raises(ValueError, match=r"3 texts are wanted: 2 documents .* have 200 tokens"):
        report(arguments_of(place, tmp_path / "none", texts=3))


def test_a_student_that_cannot_be_is_refused_before_anything_is_read(place, tmp_path, monkeypatch):
    monkeypatch.setattr(upcycling_report, "load_teacher", None)
    with pytest.raises(ValueError, match="names 7, but the teacher sees all tokens in the layers 0, 1, 2"):
        report(arguments_of(place, tmp_path / "none", students={"a": {"keep": [7]}}))
