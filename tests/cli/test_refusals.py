"""Wrong input of every command: one line that names it, a status, and nothing lost or executed."""

import dataclasses
import hashlib
import io
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationMixin

from hf_hybrid_ssm import cli
from hf_hybrid_ssm.cli import generate, main
from hf_hybrid_ssm.cli.errors import TRACEBACK
from hf_hybrid_ssm.cli.parsing import is_path
from hf_hybrid_ssm.planning import Setup
from tests.tiny_models import build


def refused(capsys, *arguments, status=1):
    """What a command says when it refuses; it is one line, after the usage where that was wrong."""
    try:
        found = main([str(argument) for argument in arguments])
    except SystemExit as end:
        found = end.code
    said = capsys.readouterr().err
    assert found == status, (arguments, found, said)
    last = said.splitlines()[-1]
    if status == 1:
        assert said == f"{last}\n" and "Traceback" not in said, said
    return last


# -- folders ----------------------------------------------------------------------------------------------------------


def test_sizes_that_no_memory_has(copy, capsys):
    saved = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(saved | {"hidden_size": 10**15}))
    for command in ("check", "card", "plan"):
        assert "no model of this configuration can be" in refused(capsys, command, copy)


def test_no_code_of_a_folder_is_executed(copy, tmp_path, capsys, monkeypatch):
    """Without a model_type, transformers asks; whoever says yes runs what lies there."""
    mark = tmp_path / "executed"
    main(["export", str(copy)])
    code = copy / "configuration_longhorn.py"
    saved = json.loads((copy / "config.json").read_text())
    del saved["model_type"]
    (copy / "config.json").write_text(json.dumps(saved))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    capsys.readouterr()
    for text in (code.read_text(), f"open({str(mark)!r}, 'w')\n"):
        code.write_text(text)
        for arguments in (["check", copy], ["generate", copy, "--prompt", "a"], ["card", copy], ["plan", copy]):
            assert str(copy) in refused(capsys, *arguments)
    assert not mark.exists()


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path, capsys, monkeypatch):
    def asked(*_, **__):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", asked)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("./nope", "/nope/dir", "runs/mine", "a/b/c", "nope/"):
        assert is_path(name)
        assert repr(name) in refused(capsys, "generate", name, "--prompt", "a")
    for command in ("check", "card", "export", "plan"):
        assert "there is no folder" in refused(capsys, command, "./nope")
    assert not is_path("nope") and not is_path("someone/model")
    assert "there is no folder '/nope/x'" in refused(capsys, "eval", "--model_args", "dtype=auto,pretrained=/nope/x")


def test_a_name_that_may_be_the_hubs_is_said_not_to_be_a_folder(capsys, monkeypatch):
    def missing(name, **_):
        raise OSError(f"{name} is not there either.\nSee the documentation.")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", missing)
    assert main(["generate", "someone/model", "--prompt", "a"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "there is no folder 'someone/model' here; the Hub is asked for a model of that name"
    assert second == "hf-hybrid-ssm generate: someone/model is not there either. See the documentation."


def test_hashes_and_values(copy, capsys):
    assert main(["check", str(copy), "--json"]) == 0 and "hashes" not in json.loads(capsys.readouterr().out)
    names = ("config.json", "model.safetensors")
    lines = [f"{hashlib.sha256((copy / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (copy / "SHA256SUMS").write_text("".join(lines))
    assert main(["check", str(copy), "--values", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hashes"] == 2 and found["values"] > 1000
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    tensors["model.norm.weight"][4] = torch.inf
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert "model.safetensors is not the file that SHA256SUMS names" in refused(capsys, "check", copy)
    (copy / "SHA256SUMS").write_text(lines[0])
    assert "model.norm.weight holds 2 NaN or infinite" in refused(capsys, "check", copy, "--values")
    assert main(["check", str(copy)]) == 0
    for line, message in (
        ("0" * 64 + "  gone\n", "gone is missing"),
        ("x\n", "line 1"),
        ("0" * 64 + "  ../x", "line 1"),
    ):
        (copy / "SHA256SUMS").write_text(line)
        capsys.readouterr()
        assert message in refused(capsys, "check", copy)


def test_a_card_written_by_hand_stays(copy, capsys):
    (copy / "README.md").write_text("Mine.\n")
    assert "--overwrite" in refused(capsys, "card", copy)
    assert (copy / "README.md").read_text() == "Mine.\n"
    assert main(["card", str(copy), "--overwrite"]) == 0
    written = (copy / "README.md").read_text()
    assert "Mine." not in written and main(["card", str(copy)]) == 0  # the same again is no loss


# -- generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--device", "tpu"], 2, "--device: 'tpu' is not a device of torch"),
        (["--device", "cpu:7"], 2, "this machine has 1 of them"),
        (["--device", "meta"], 2, "is not available"),
        (["--dtype", "float99"], 2, "float99"),
        (["--prompt", "\udcff"], 1, "the prompt is not UTF-8 text: byte 0xff at position 0"),
        (["--top-p", "3"], 2, "3 must lie above 0 and at most at 1"),
        (["--temperature", "0"], 1, "strictly positive"),
        (["--seed", "-1"], 1, "between 0 and"),
    ],
)
def test_options_of_generate(options, status, message, checkpoint, capsys):
    assert message in refused(capsys, "generate", checkpoint, "--prompt", "a", *options, status=status)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is refused")
def test_a_device_that_this_torch_lacks(checkpoint, tmp_path, capsys):
    read = ["read", checkpoint, checkpoint / "config.json", "--context", tmp_path / "context"]
    for command in (["generate", checkpoint, "--prompt", "a"], ["chat", checkpoint], read):
        said = refused(capsys, *command, "--device", "cuda", status=2)
        assert "'cuda' is not available" in said and torch.__version__ in said


def test_prompts_are_read_as_utf8_in_any_locale(monkeypatch):
    assert generate.text_of("caf\udcc3\udca9") == "café"  # how Python holds bytes that an ASCII locale cannot read
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    with pytest.raises(ValueError, match="0xff at position 1"):
        generate.text_of(None)


def test_a_terminal_without_the_letters_gets_question_marks(checkpoint, monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(cli.generate, "main", lambda _: print("é 模") or 0, raising=False)
    assert main(["generate"]) == 0
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"? ?\n"


@pytest.mark.parametrize(
    ("variant", "class_name"),
    [
        ("spade s4 window", "SpadeForMaskedLM"),
        ("longhorn", "LonghornModel"),
        ("bst s5 bidirectional", "BstForMaskedLM"),
    ],
)
def test_a_model_that_writes_nothing(variant, class_name, tmp_path, capsys):
    build(variant, class_name).save_pretrained(tmp_path)
    assert f"a {class_name}, which generates no text" in refused(capsys, "generate", tmp_path, "--prompt", "a")


def test_an_empty_prompt_begins_with_the_begin_token(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    assert tokenizer.bos_token_id != tokenizer.eos_token_id
    assert generate.inputs_of(tokenizer, "")["input_ids"].tolist() == [[tokenizer.bos_token_id]]
    tokenizer.bos_token = None
    assert generate.inputs_of(tokenizer, "")["input_ids"].tolist() == [[tokenizer.eos_token_id]]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate.inputs_of(tokenizer, "")


def test_sampling_options_arrive(checkpoint, monkeypatch, capsys):
    seen = []

    def generating(self, input_ids, **options):
        seen.append({name: value for name, value in options.items() if name not in ("attention_mask", "streamer")})
        return input_ids

    monkeypatch.setattr(GenerationMixin, "generate", generating)
    given = ["--top-k", "3", "--top-p", "0.5", "--temperature", "2", "--max-new-tokens", "4"]
    for options in (given, ["--sample"], []):
        assert main(["generate", str(checkpoint), "--prompt", "one", *options]) == 0
    drawn = {"do_sample": True}
    assert seen == [
        {"max_new_tokens": 4, "temperature": 2.0, "top_p": 0.5, "top_k": 3} | drawn,
        {"max_new_tokens": 100} | drawn,
        {"max_new_tokens": 100},
    ]


# -- plan, eval, demo -------------------------------------------------------------------------------------------------


def test_plan_reads_a_folder_and_fields(checkpoint, capsys):
    small = ["--batch", "1", "--length", "16", "--json"]
    sizes = {}
    for fields in ([], ["config.state_size=3"]):
        assert main(["plan", str(checkpoint), *fields, *small]) == 0
        found = json.loads(capsys.readouterr().out)
        sizes[tuple(fields)] = found["parameters"]
        assert found["folder"] == str(checkpoint)
    assert found["config"] == {"state_size": 3}
    of_folder, changed = sizes.values()
    assert of_folder == sum(p.numel() for p in load_file(checkpoint / "model.safetensors").values()) != changed
    assert "did you mean state_size" in refused(capsys, "plan", checkpoint, "config.stat_size=3")
    assert "config.FIELD=VALUE was expected" in refused(capsys, "plan", "longhorn/125m", "state_size=3")


def test_plan_looks_at_its_page_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_hybrid_ssm.planning.report.page", lambda *_: pytest.fail("planned for minutes"))
    (tmp_path / "mine.md").write_text("Mine.\n")
    for path, message in (
        (tmp_path / "nowhere/page.md", "there is no folder"),
        (tmp_path, "is a folder"),
        (tmp_path / "mine.md", "holds something else"),
    ):
        assert message in refused(capsys, "plan", "--markdown", path)
    assert (tmp_path / "mine.md").read_text() == "Mine.\n"


@pytest.mark.parametrize("page", [[], ["--markdown", "page.md"]], ids=["names", "page"])
def test_plan_without_a_model_ignores_no_option(page, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_hybrid_ssm.planning.report.page", lambda *_: pytest.fail("planned for minutes"))
    given = {"batch": "1", "length": "8192", "gpus": "64", "dtype": "bfloat16", "optimizer": "sgd"}
    given |= {"sharding": "fsdp2", "kernels": "torch"}
    flags = [[f"--{name}", value] for name, value in given.items()] + [["--bf16"], ["--checkpointing"]]
    flags += [["--json"]] if page else []
    for options in flags:
        said = refused(capsys, "plan", *page, *options, status=2)
        assert f"{options[0]}: give FAMILY/PRESET or a FOLDER" in said
    said = refused(capsys, "plan", *page, *(part for options in flags for part in options), status=2)
    assert all(options[0] in said for options in flags)
    assert {*given, "mixed_precision", "checkpointing"} == {field.name for field in dataclasses.fields(Setup)}
    assert not list(tmp_path.iterdir())


def test_lm_evals_own_refusals_are_one_line(checkpoint, capsys, monkeypatch):
    def unknown():
        raise ValueError("Tasks not found: nosuchtask\n")  # as it says

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", unknown)
    given = ["run", "--model", "hf", "--model_args", f"pretrained={checkpoint}", "--tasks", "nosuchtask"]
    assert "nosuchtask" in refused(capsys, "eval", *given)


OUTPUTS = {  # what is read comes after, and is not there: {missing}
    "read": ("{model}", "{missing}", "--context", "{folder}", "--overwrite"),
    "read below a file": ("{model}", "{missing}", "--context", "{file}/context"),
    "convert": ("longhorn", "{missing}", "{file}"),
    "export": ("{model}", "--full", "{file}", "--overwrite"),
    "plan": ("--markdown", "{folder}"),
    "upcycle": ("{missing}", "{file}", "--overwrite"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_what_cannot_be_written_is_said_before_anything_is_read(case, checkpoint, tmp_path, capsys):
    places = {"model": checkpoint, "missing": tmp_path / "missing", "folder": tmp_path, "file": tmp_path / "file"}
    places["file"].touch()
    said = refused(capsys, case.split()[0], *(part.format(**places) for part in OUTPUTS[case]))
    assert str(places["missing"]) not in said and str(tmp_path) in said


def test_the_demo_writes_into_no_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        assert "is a file" in refused(capsys, "demo", "--output", tmp_path / path)


# -- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "check", "demo", "recipe"])
def test_stopped_by_hand(command, monkeypatch, capsys):
    def stopped(_):
        raise KeyboardInterrupt

    module = __import__(f"hf_hybrid_ssm.cli.{command}", fromlist=["main"])
    monkeypatch.setattr(module, "main", stopped)
    assert main([command]) == 130
    assert capsys.readouterr().err.strip() == f"hf-hybrid-ssm {command}: interrupted"


def test_where_an_error_comes_from_can_be_asked(tmp_path, monkeypatch):
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(FileNotFoundError):
        main(["card", str(tmp_path / "nope")])
