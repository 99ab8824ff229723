"""`hf-hybrid-ssm`: what each command prints and returns, and how little its help imports."""

import io
import json
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import hf_hybrid_ssm
from hf_hybrid_ssm import kept_programs
from hf_hybrid_ssm.cli import COMMANDS, main
from hf_hybrid_ssm.planning import Setup, plan
from hf_hybrid_ssm.planning.presets import preset_config
from tests.cli.folders import TEXT, forked, python, save_checkpoint
from tests.tiny_models import build, compiles, config_of

# -- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_quick_and_says_what_to_type(command):
    code = f"""
import sys
from hf_hybrid_ssm.cli import main
try:
    main({[*([command] if command else []), "--help"]})
except SystemExit as end:
    assert not end.code
sys.exit(bool({{"torch", "transformers", "numpy"}} & sys.modules.keys()))
"""
    shown = python("-c", code)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout.startswith("usage: hf-hybrid-ssm " + command)
    for other in COMMANDS if not command else ():
        assert f"  {other} " in shown.stdout


def test_wrong_usage_is_status_2(capsys):
    for arguments in (["trian"], ["check"], ["plan", "--gpus", "many"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert "usage: " in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert hf_hybrid_ssm.__version__ in capsys.readouterr().out


# -- generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["longhorn", "encoder-decoder"])
def test_generate_streams_what_the_model_says(variant, tmp_path, capsys):
    folder = save_checkpoint(tmp_path / variant, variant)
    auto = AutoModelForSeq2SeqLM if variant == "encoder-decoder" else AutoModelForCausalLM
    tokenizer, model = AutoTokenizer.from_pretrained(folder), auto.from_pretrained(folder).eval()
    inputs = tokenizer("one two", return_tensors="pt", return_token_type_ids=False)
    expected = model.generate(**inputs, max_new_tokens=7)[0]
    expected = expected[1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True)
    capsys.readouterr()
    command = ["generate", str(folder), "--prompt", "one two", "--max-new-tokens", "7"]
    assert main(command) == 0
    assert capsys.readouterr().out == text + "\n"
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == text and found["prompt"] == "one two" and found["new_tokens"] == len(expected)


@compiles
def test_a_compiled_step_writes_the_same(checkpoint, tmp_path, capsys, monkeypatch):
    """It says that it compiles, and that once: the program is kept."""
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path))
    command = ["generate", str(checkpoint), "one two", "--max-new-tokens", "7"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    for prefix in ("compiling ", ""):
        monkeypatch.setattr(kept_programs, "_programs", {})
        assert main([*command, "--compile"]) == 0
        shown = capsys.readouterr()
        assert shown.out == expected
        assert not kept_programs.CAN_KEEP or (shown.err.startswith(prefix) and bool(prefix) == ("kept" in shown.err))


def test_what_cannot_be_compiled_is_refused(tmp_path, capsys):
    folder = save_checkpoint(tmp_path / "folder", "encoder-decoder")
    assert main(["generate", str(folder), "one", "--compile"]) == 1
    assert "--compile is for decoders on a CPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", str(folder), "one", "--compile", "--context", "file.safetensors"])
    assert "--compile has a cache of its own" in capsys.readouterr().err


def test_a_decoder_writes_no_more_than_it_has_positions_for(tmp_path, capsys):
    """The default of 100 tokens is more than this one has; what was written is not lost in an error."""
    folder = save_checkpoint(tmp_path / "seq2seq", "encoder-decoder")
    file = folder / "generation_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"suppress_tokens": [fields["eos_token_id"]]}))
    limit = config_of("encoder-decoder").max_target_positions
    assert limit < 100 and main(["generate", str(folder), TEXT, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["new_tokens"] == limit
    assert f"the text ends after {limit} tokens: the decoder has no more positions." in said.err
    assert main(["generate", str(folder), TEXT, "--json", "--max-new-tokens", str(limit)]) == 0
    assert "positions" not in capsys.readouterr().err


def test_generate_samples_by_seed_and_reads_the_input(checkpoint, capsys, monkeypatch):
    texts = []
    for seed in (1, 1, 2):
        monkeypatch.setattr("sys.stdin", io.StringIO(TEXT + "\n"))
        command = ["generate", str(checkpoint), "--temperature", "1.5", "--top-k", "200", "--seed", str(seed)]
        assert main([*command, "--max-new-tokens", "20", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["prompt"] == TEXT
        texts.append(found["text"])
    assert texts[0] == texts[1] != texts[2]


# -- check ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "class_name"),
    [
        ("longhorn", "LonghornForCausalLM"),
        ("bst s5 bidirectional", "BstForMaskedLM"),
        ("spade s4 window", "SpadeForSequenceClassification"),
        ("spade adaptive", "SpadeForCausalLM"),
        ("spade batchnorm", "SpadeModel"),
        ("encoder-decoder", "SpadeForConditionalGeneration"),
        ("lmu-isa untied", "LmuIsaForQuestionAnswering"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "8KB"}, {"export_code": True}], ids=str)
def test_check_accepts_every_folder(variant, class_name, options, tmp_path, capsys):
    build(variant, class_name).save_pretrained(tmp_path, **options)
    assert main(["check", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] and found["tensors"] > 0 and bool(found["code"]) == ("export_code" in options)


def test_our_from_pretrained_names_the_file(copy, tmp_path):
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        AutoModelForCausalLM.from_pretrained(copy)
    build("longhorn").save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    next((tmp_path / "sharded").glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-\d+\.safetensors is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")


# -- the others -------------------------------------------------------------------------------------------------------


def test_export_and_card(copy, capsys):
    assert main(["export", str(copy)]) == 0
    assert "code files" in capsys.readouterr().out and (copy / "modeling_longhorn.py").is_file()
    assert main(["card", str(copy), "--stdout"]) == 0
    printed = capsys.readouterr().out
    assert not (copy / "README.md").exists() and "trust_remote_code=True" in printed
    assert main(["card", str(copy)]) == 0
    assert (copy / "README.md").read_text(encoding="utf-8") + "\n" == printed


def test_what_was_written_as_json(copy, capsys):
    """For programs: what was written and where, and nothing else."""
    assert main(["export", str(copy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(copy) and found["code"] == len(list(copy.glob("*.py")))
    assert main(["card", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(copy / "README.md")}
    with pytest.raises(SystemExit, match="2"):
        main(["card", str(copy), "--json", "--stdout"])
    assert "give one of them" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_long_work_has_a_named_bar_in_a_terminal(copy, tmp_path, monkeypatch):
    (tmp_path / "text").write_text(TEXT)
    read = ["read", str(copy), str(tmp_path / "text"), "--context", str(tmp_path / "context"), "--piece", "2"]
    monkeypatch.setattr("hf_hybrid_ssm.doctor.every_op", lambda: {})
    for command, name in ((read, "reading"), (["check", str(copy), "--values"], "tensors"), (["doctor"], "ops")):
        for stream in (Terminal(), io.StringIO()):
            (tmp_path / "context").unlink(missing_ok=True)
            monkeypatch.setattr("sys.stderr", stream)
            assert main(command) == 0
            assert (f"{name}: " in stream.getvalue()) == stream.isatty()


def test_plan(capsys, tmp_path):
    sharded = ["plan", "longhorn/125m", "--gpus", "8", "--batch", "8", "--length", "1024", "--sharding", "fsdp2"]
    assert main(sharded) == 0
    said = capsys.readouterr().out
    found = plan(preset_config("longhorn/125m"), Setup(gpus=8, sharding="fsdp2"))
    assert f"{found.parameters:,} parameters" in said and "gathered" in said and "buckets" not in said
    assert main([*sharded, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == found.total
    assert main(["plan"]) == 0
    assert "longhorn/125m" in capsys.readouterr().out.splitlines()
    with pytest.raises(SystemExit):
        main(["plan", "longhorn/125m", "--markdown", str(tmp_path / "page.md")])


def test_convert_wants_pairs(tmp_path, capsys):
    (tmp_path / "in.pt").touch()
    for arguments in (["--set", "sliding_window"], []):
        with pytest.raises(SystemExit) as end:
            main(["convert", "bst" if not arguments else "spade", str(tmp_path / "in.pt"), "out", *arguments])
        assert end.value.code == 2
    assert "FIELD=VALUE was expected" in capsys.readouterr().err


def test_eval_hands_over(monkeypatch):
    seen = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.append(list(sys.argv)))
    assert main(["eval", "run", "--tasks", "piqa"]) == 0
    assert seen == [["lm_eval", "run", "--tasks", "piqa"]]


def test_demo_runs_the_recipe(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("hf_hybrid_ssm.cli.recipe.run_file", lambda *given: seen.append(given) or 0)
    assert main(["demo", "--output", str(tmp_path), "--steps", "3", "--json"]) == 0
    ((path, options),) = seen
    assert path.name == "demo.py" and path.is_file() and (path.parent / "_lib").is_dir()
    assert options == [f"--output={tmp_path}", "--steps=3", "--questions=200", "--json"]


def test_the_module_is_the_command(checkpoint):
    ran = forked("-m", "hf_hybrid_ssm", "check", checkpoint, with_transformers=False)
    assert ran.returncode == 0 and "tensors" in ran.stdout
    assert config_of("longhorn").model_type == "longhorn"
