"""The commands on a delta: each says what it needs, and with its teacher does what it does with a whole model."""

import json

import pytest
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.evaluation import evaluate
from hf_hybrid_ssm.upcycle import Keep, load_teacher, save_delta, upcycle
from hf_hybrid_ssm.upcycle.delta import TEACHER
from tests.evaluation.test_harness import write_task
from tests.upcycle.teacher_files import write_gguf


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Teacher, delta with a tokenizer, delta without, and the whole student."""
    folder = tmp_path_factory.mktemp("deltas")
    source = write_gguf(folder / "teacher.gguf", quantized=True)
    teacher = load_teacher(source)
    student, _ = upcycle(teacher, Keep([2], window=8), sink="constant", memory="context", memory_layers=[1])
    save_delta(student, folder / "delta", teacher, tokenizer=teacher.tokenizer)
    save_delta(student, folder / "bare", teacher)
    student.save_pretrained(folder / "whole")
    teacher.tokenizer.save_pretrained(folder / "whole")
    return folder


@pytest.fixture(autouse=True)
def nobody_said_it(monkeypatch):
    monkeypatch.delenv(TEACHER, raising=False)


@pytest.mark.parametrize("name", ["delta", "bare"])
def test_generate(name, made, capsys):
    said = ["--prompt", "one two", "--max-new-tokens", "5"]
    assert main(["generate", str(made / "whole"), *said]) == 0
    wanted = capsys.readouterr().out
    assert main(["generate", str(made / name), *said]) == 1
    assert "nothing outside of the folder is read unasked" in capsys.readouterr().err
    assert main(["generate", str(made / name), *said, "--teacher", str(made / "teacher.gguf")]) == 0
    assert capsys.readouterr().out == wanted
    assert main(["generate", str(made / name), *said, "--teacher", "recorded"]) == 1  # which takes names on the Hub
    assert "was made of the folder or file 'teacher.gguf'" in capsys.readouterr().err
    assert main(["generate", str(made / "whole"), *said, "--teacher", "x"]) == 1
    assert "--teacher x is for a delta" in capsys.readouterr().err


def test_read_and_go_on(made, tmp_path, capsys):
    (tmp_path / "text").write_text("one two three four")
    context, teacher = str(tmp_path / "context"), str(made / "teacher.gguf")
    assert main(["read", str(made / "delta"), str(tmp_path / "text"), "--context", context, "--teacher", teacher]) == 0
    capsys.readouterr()
    texts = []
    for arguments in ([str(made / "delta"), "--teacher", teacher], [str(made / "whole")]):
        assert main(["generate", *arguments, "--context", context, "--prompt", " five", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_check(made, tmp_path, capsys):
    assert main(["check", str(made / "delta"), "--values", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"]
    assert main(["check", str(made / "delta"), "--teacher", str(made / "teacher.gguf")]) == 0
    assert "carried" in capsys.readouterr().out
    other = write_gguf(tmp_path / "teacher.gguf")  # not quantized
    assert main(["check", str(made / "delta"), "--teacher", str(other)]) == 1
    assert "is not the teacher of" in capsys.readouterr().err
    assert main(["check", str(made / "whole"), "--teacher", str(other)]) == 1
    assert "is for a delta" in capsys.readouterr().err


def test_export_writes_the_whole_model(made, tmp_path, capsys):
    out, teacher = tmp_path / "out", ["--teacher", str(made / "teacher.gguf")]
    assert main(["export", str(made / "bare"), "--full", str(out)]) == 1
    assert "is a delta of the teacher 'teacher.gguf'" in capsys.readouterr().err and not out.exists()
    assert main(["export", str(made / "bare"), "--full", str(out), *teacher]) == 0
    assert "code files" in capsys.readouterr().out
    assert main(["check", str(out)]) == 0 and (out / "tokenizer.json").is_file()
    found, wanted = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, made / "whole"))
    assert all((found.get_parameter(name) == value).all() for name, value in wanted.named_parameters())
    capsys.readouterr()
    assert main(["export", str(made / "bare"), "--full", str(out), *teacher]) == 1
    assert "is not empty: name another folder, or give --overwrite" in capsys.readouterr().err
    assert main(["export", str(made / "bare"), "--full", str(out), *teacher, "--overwrite"]) == 0
    assert main(["export", str(made / "bare")]) == 1
    assert "export the whole model (--full)" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(made / "whole"), *teacher])


def test_scores_are_those_of_the_whole_model(made, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    write_task(tmp_path)
    options = {"include_path": tmp_path / "tasks", "data_folder": tmp_path, "device": "cpu", "bootstrap_iters": 0}
    options["log_samples"] = True
    scores = []
    for name, teacher in (("whole", None), ("delta", made / "teacher.gguf"), ("bare", made / "teacher.gguf")):
        found = evaluate(str(made / name), ["counting_here"], teacher=teacher, **options)
        scores.append([sample["filtered_resps"] for sample in found["samples"]["counting_here"]])
    assert scores[0] == scores[1] == scores[2]
    with pytest.raises(ValueError, match="teacher='x' is for a delta"):
        evaluate(str(made / "whole"), ["counting_here"], teacher="x", **options)
