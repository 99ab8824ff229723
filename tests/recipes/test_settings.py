"""Settings: YAML, then pairs that win over it; what is wrong is named."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from _lib.settings import filled, read_settings
from transformers import TrainingArguments

from hf_hybrid_ssm.cli.settings import as_flags, setting_pairs


@dataclass
class First:
    """What it is made of."""

    size: int = field(default=1, metadata={"help": "how large it is"})
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Second:
    folder: str = ""
    files: list[str] = field(default_factory=list)


@pytest.fixture
def read(tmp_path):
    def read(text, *pairs):
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return read_settings("some.py", (First, Second), [str(path), *pairs])

    return read


def test_pairs_win_over_the_file(read):
    first, second = read("size: 3\nconfig: {a: 1, b: 2}\nfolder: x", "size=4", "config.b=5", "files=[p, q]")
    assert first == First(4, {"a": 1, "b": 5})
    assert second == Second("x", ["p", "q"])


def test_no_is_a_name_on_the_command_line(read):
    assert read("", "folder=no")[1].folder == "no"


def test_environment_variables(read, monkeypatch):
    monkeypatch.setenv("SOME_FOLDER", "/data")
    monkeypatch.delenv("NOT_SET", raising=False)
    assert read("files: [$SOME_FOLDER/x.txt]")[1].files == ["/data/x.txt"]
    with pytest.raises(ValueError, match="NOT_SET"):
        read("folder: $NOT_SET/x")


@pytest.mark.parametrize(
    "text, pairs, message",
    [("sise: 3", [], "sise"), ("size: 3", ["size"], "key=value"), ("- 3", [], "key: value")],
)
def test_bad_settings(read, text, pairs, message):
    with pytest.raises(ValueError, match=message):
        read(text, *pairs)


def test_numbers_without_a_dot_are_numbers(read):
    assert read("config: {a: 1e-3}", "config.b=2E+4", "config.c=1e5x")[0].config == {"a": 1e-3, "b": 2e4, "c": "1e5x"}


def test_help_is_printed_and_no_failure(capsys):
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as stop:
            read_settings("some.py", (First, Second), [flag])
        printed = capsys.readouterr()
        assert stop.value.code == 0 and not printed.err
        assert "usage: python recipes/some.py CONFIG.yaml" in printed.out
        assert "size: int = 1" in printed.out and "how large it is" in printed.out
        assert "config: dict[str, Any] = {}" in printed.out and "files: list[str] = []" in printed.out
    with pytest.raises(SystemExit, match=r"usage: python recipes/some\.py"):
        read_settings("some.py", (First, Second), [])


def test_help_has_groups_and_only_names_of_what_others_document(capsys):
    from transformers import TrainingArguments

    with pytest.raises(SystemExit):
        read_settings("some.py", (First, TrainingArguments), ["--help"])
    printed = capsys.readouterr().out
    assert "First: What it is made of." in printed
    assert "TrainingArguments, as documented by transformers:" in printed and "learning_rate" in printed
    assert max(map(len, printed.splitlines())) < 120


def test_one_value_is_a_list_of_one_and_null_is_none(read):
    assert read("files: own.txt")[1].files == ["own.txt"]
    assert read("", "files=own.txt")[1].files == ["own.txt"]
    assert read("files: [p, q]", "files=null")[1].files == []
    with pytest.raises(ValueError, match=r"files=\{'a': 'b'\} is of type dict"):
        read("files: {a: b}")


@pytest.mark.parametrize("pairs", ["size=4 folder=x", "--size 4 --folder x", "--size=4 --folder=x"])
def test_flags_are_settings_too(read, pairs):
    assert read("size: 3", *pairs.split()) == (First(4), Second("x"))
    assert read_settings("some.py", (First, Second), pairs.split()) == (First(4), Second("x"))


def test_flags_without_values_are_true_and_negative_numbers_are_values():
    pairs = setting_pairs(["--overwrite", "--size", "-3", "--bf16", "a=b"])
    assert pairs == [("overwrite", "true"), ("size", "-3"), ("bf16", "true"), ("a", "b")]


@dataclass
class Named:
    """Mappings whose keys are names."""

    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    families: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    students: dict[str, str | dict[str, Any]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    grid: dict[str, list] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)


NAMES = ["LMU-ISA with attention", "GPT-2, two layers", "Llama 3.2 1B", "Llama 3", "BST SH:S4", "its 'own'", "a_b"]


@pytest.mark.parametrize("name", NAMES)
def test_names_stay_as_they_are(name, tmp_path):
    path = tmp_path / "settings.yaml"
    others = {other: {"rate": 1, "config": {"size": 2}} for other in NAMES}
    path.write_text(json.dumps({"variants": others, "families": {"x-y": others}, "students": others}))
    pairs = [f"--variants.{name}.rate=0.5", f"variants.{name}.config.size=3", f"models.{name}=folder/x=y"]
    pairs += [f"families.x-y.{name}.rate=0.5", f"students.{name}=FOLDER", f"grid.{name}=[1]", "--base.rate", "3"]
    (read,) = read_settings("some.py", (Named,), [str(path), *pairs])
    assert read.variants == others | {name: {"rate": 0.5, "config": {"size": 3}}}
    assert read.families == {"x-y": others | {name: {"rate": 0.5, "config": {"size": 2}}}}
    assert read.students == others | {name: "FOLDER"} and read.models == {name: "folder/x=y"}
    assert read.grid == {name: [1]} and read.base == {"rate": 3}
    # after a flag without a value, too
    assert setting_pairs(["--overwrite", *pairs[:1]]) == [("overwrite", "true"), (f"variants.{name}.rate", "0.5")]


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("variants.LMU_ISA.rate=3", r"variants has no 'LMU_ISA', did you mean 'LMU-ISA'\? variants\.NAME=VALUE makes"),
        ("families.small.LMU_ISA.rate=3", r"families\.small has no 'LMU_ISA', did you mean 'LMU-ISA'"),
        ("students.LMU ISA.keep=3", r"students has no 'LMU ISA', did you mean 'LMU-ISA'"),
        ("variants.other.rate=3", r"variants\.other\.rate: variants has no 'other'\. variants\.NAME=VALUE"),
        ("variants.LMU-ISA.rate.x=3", r"variants\.LMU-ISA\.rate is 1, which has no fields"),
    ],
)
def test_a_field_of_an_unknown_name_is_refused(pair, says, tmp_path):
    path, known = tmp_path / "settings.yaml", {"LMU-ISA": {"rate": 1}}
    path.write_text(json.dumps({"variants": known, "families": {"small": known}, "students": known}))
    with pytest.raises(ValueError, match=says):
        read_settings("some.py", (Named,), [str(path), pair])
    (read,) = read_settings("some.py", (Named,), [str(path), "variants.new=a: 1", "variants.new.rate=3"])
    assert read.variants == known | {"new": {"a": 1, "rate": 3}}


def test_a_long_first_pair_is_no_file(read):
    long = "config={" + ", ".join(f"name_{number}: {number}" for number in range(60)) + "}"
    assert len(long) > 300 and "/" not in long
    assert len(read_settings("some.py", (First, Second), [long])[0].config) == 60
    assert as_flags([long]) == [f"--{long}"]


def test_an_unknown_key_is_named_with_what_may_have_been_meant(read):
    with pytest.raises(ValueError, match=r"^unknown setting 'sise', did you mean 'size'\? `python recipes/some.py"):
        read("sise: 3")


@pytest.mark.parametrize("name", ["resume_from_checkpoint", "do_train", "do_predict"])
def test_what_no_recipe_reads_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' is read by no recipe.*resume=auto"):
        read_settings("some.py", (TrainingArguments,), [f"{name}=true"])


@pytest.mark.parametrize("given, wanted", [({}, True), ({"use_cpu": False}, False)])
def test_without_an_accelerator_the_processor_is_used(given, wanted, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    @dataclass
    class Training:
        use_cpu: bool = False

    assert filled((Training,), given)[0].use_cpu is wanted
    (training,) = filled((TrainingArguments,), {"output_dir": str(tmp_path), "bf16": True})
    assert training.use_cpu and training.bf16
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not filled((Training,), {})[0].use_cpu
