"""How a recipe refuses its input: one line, before anything is lost; nothing is deleted before everything is read."""

import json
from pathlib import Path

import demo
import evaluate_lm
import length_extrapolation
import listops
import pretrain_clm
import pytest
import scaling_law
import sft
import train_tokenizer
import upcycle
import yaml
from _lib import entry
from _lib.checks import check_config, check_output
from _lib.entry import guarded, start
from _lib.settings import read_settings
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from hf_hybrid_ssm.cli.errors import TRACEBACK
from tests.recipes import small

CONFIGS = Path(__file__).parents[2] / "recipes/configs"
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}


@pytest.fixture(autouse=True)
def before_training(monkeypatch):
    monkeypatch.setattr(entry, "_training", [False])
    monkeypatch.delenv(TRACEBACK, raising=False)


@pytest.fixture
def texts(tmp_path):
    return small.write_lines(
        tmp_path / "texts.jsonl", [{"text": f"line {number} of a short text"} for number in range(80)]
    )


@pytest.fixture
def earlier(tmp_path):
    """What an earlier run left: checkpoints, and a model."""
    for name in ("checkpoint-10", "checkpoint-20"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "model.safetensors").write_text("precious")
    (tmp_path / "run/config.json").write_text("{}")
    return tmp_path / "run"


def is_whole(folder):
    return len(list(folder.glob("checkpoint-*/model.safetensors"))) == 2


def said_by(monkeypatch, recipe, run, classes, *pairs):
    """The one line with which a recipe ends."""
    monkeypatch.setattr("sys.argv", [recipe, *map(str, pairs)])
    with pytest.raises(SystemExit) as end:
        start(recipe, run, *classes)
    said = str(end.value.code)
    assert said.startswith(f"{recipe}: ") and "\n" not in said, said
    return said


CLM = ("pretrain_clm.py", pretrain_clm.pretrain)
CLM_CLASSES = (pretrain_clm.ModelArguments, pretrain_clm.DataArguments, TrainingArguments)
GOOD = ["model_type=longhorn", "use_cpu=true", "report_to=none"]
BAD = {
    "nowhere.yaml": ["nowhere.yaml"],
    "hiden_size": [*GOOD, "train_files=[x]", "config.hiden_size=77"],
    "did you mean hidden_size": [*GOOD, "train_files=[x]", "config.hiden_size=77"],
    "longhron": ["model_type=longhron", "train_files=[x]"],
    "'12m'": [*GOOD, "train_files=[x]", "preset=12m"],
    "no file matches": [*GOOD, "train_files=[nowhere.jsonl]", "output_dir=OUT"],
    "of type dict, not list[str]": [*GOOD, "train_files={a: x}"],
    "max_steps='many' is of type str, not int": [*GOOD, "train_files=[x]", "max_steps=many"],
    "learning_rate='fast' is of type str, not float": [*GOOD, "train_files=[x]", "learning_rate=fast"],
    "the value is not YAML": [*GOOD, "train_files=[x"],
    "config is 3": ["model_type=longhorn", "config=3", "config.x=1"],
    "names './nope', but there is no such folder": ["model_name_or_path=./nope", "train_files=[x]", "output_dir=OUT"],
    "unknown setting 'max_step', did you mean 'max_steps'?": [*GOOD, "train_files=[x]", "max_step=3"],
    "describe a new model": ["model_name_or_path=x", "train_files=[x]", "config.hidden_size=3"],
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_settings_are_one_line(message, monkeypatch, tmp_path):
    pairs = [pair.replace("OUT", str(tmp_path / "out")) for pair in BAD[message]]
    assert message in said_by(monkeypatch, *CLM, CLM_CLASSES, *pairs)
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "fine"}\n{"text": \n', encoding="utf-8")
    pairs = [*GOOD, f"train_files=[{tmp_path}/texts.jsonl]", f"output_dir={tmp_path}/out"]
    said_by(monkeypatch, *CLM, CLM_CLASSES, *pairs)
    (tmp_path / "bad.yaml").write_text("a: [1,\nb: 2", encoding="utf-8")
    assert "bad.yaml is not YAML" in said_by(monkeypatch, *CLM, CLM_CLASSES, tmp_path / "bad.yaml")


def test_what_is_missing_is_named(monkeypatch):
    classes = (sft.SftArguments, sft.SFTConfig)
    said = said_by(monkeypatch, "sft.py", sft.finetune, classes, "output_dir=x", "train_files=[x]")
    assert said == "sft.py: model_name_or_path is missing: the language model to start from."


def test_errors_after_training_has_begun_show_where_they_come_from(monkeypatch):
    def fails():
        raise ValueError("deep inside")

    with pytest.raises(SystemExit, match=r"some\.py: deep inside"):
        guarded("some.py", fails)
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(ValueError, match="deep inside"):
        guarded("some.py", fails)
    monkeypatch.delenv(TRACEBACK)

    def trains_and_fails():
        entry.training_begins()
        fails()

    with pytest.raises(ValueError, match="deep inside"):
        guarded("some.py", trains_and_fails)
    with pytest.raises(SystemExit, match="deep inside"):  # the next one of the process begins anew
        guarded("some.py", fails)


def test_stopped_by_hand(capsys):
    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        guarded("some.py", stopped)
    assert end.value.code == 130 and capsys.readouterr().err == "\nsome.py: interrupted\n"


@pytest.mark.parametrize(
    "wrong",
    [
        {"train_files": "nowhere.jsonl"},
        {"tokenizer": "./nowhere"},
        {"config": {"hidden_size": "wide"}},
        {"config": {"hidden_size": 0}},
        {"text_column": "words"},
    ],
    ids=str,
)
def test_nothing_is_deleted_before_everything_has_been_read(wrong, texts, earlier):
    given = {"train_files": texts} | wrong
    model = pretrain_clm.ModelArguments("longhorn", config=TINY | given.pop("config", {}), overwrite=True)
    data = pretrain_clm.DataArguments([given.pop("train_files")], sequence_length=16, **given)
    training = TrainingArguments(str(earlier), use_cpu=True, report_to="none")
    with pytest.raises((ValueError, OSError)):
        pretrain_clm.pretrain(model, data, training)
    assert is_whole(earlier)


def test_what_the_user_asks_to_overwrite_goes_last(texts, earlier):
    model = pretrain_clm.ModelArguments("longhorn", config=TINY, overwrite=True)
    data = pretrain_clm.DataArguments([texts], sequence_length=16, tokenizer_vocab_size=300)
    pretrain_clm.pretrain(model, data, small.training(earlier, max_steps=1))
    assert not list(earlier.glob("checkpoint-*")) and (earlier / "model.safetensors").is_file()


def test_committed_settings_overwrite_nothing():
    """The word must be the user's own."""
    files = sorted(CONFIGS.rglob("*.yaml"))
    assert len(files) > 50
    for path in files:
        assert "overwrite" not in yaml.safe_load(path.read_text(encoding="utf-8")), path


def test_sft_keeps_what_is_there(texts, earlier, tmp_path, monkeypatch):
    local = CONFIGS / "sft/local.yaml"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", **TINY, vocab_size=300)).save_pretrained(
        tmp_path / "base"
    )
    pairs = [f"model_name_or_path={tmp_path}/base", f"output_dir={earlier}", f"train_files=[{tmp_path}/nowhere.jsonl]"]
    classes = (sft.SftArguments, sft.SFTConfig)
    assert "is not empty" in said_by(monkeypatch, "sft.py", sft.finetune, classes, local, *pairs)
    said = said_by(monkeypatch, "sft.py", sft.finetune, classes, local, *pairs, "overwrite=true")
    assert "nowhere.jsonl" in said and is_whole(earlier)


@pytest.mark.parametrize("recipe", ["length", "scaling"])
def test_a_sweep_keeps_its_runs_until_all_settings_are_read(recipe, texts, tmp_path):
    member = tmp_path / "out/a/x-0" if recipe == "scaling" else tmp_path / "out/a-0"
    member.mkdir(parents=True)
    (member / "results.json").write_text("{}")
    base = {"model_type": "longhorn", "train_files": [texts]}
    good, bad = {"config": TINY}, {"config": {"hiden_size": 3}}
    where = {"output_dir": str(tmp_path / "out"), "overwrite": True, "base": base}
    with pytest.raises(ValueError, match="hiden_size"):
        if recipe == "length":
            options = {"lengths": [16, 32], "scored_tokens": 32, "variants": {"a": good, "b": bad}}
            given = length_extrapolation.ExtrapolationArguments([texts], **options, **where)
            length_extrapolation.length_extrapolation(given)
        else:
            families = {"a": {"x": good, "y": good, "z": bad}}
            scaling_law.scaling_law(scaling_law.ScalingArguments(families=families, **where))
    assert (member / "results.json").exists()


def test_resume_replaces_no_other_model(earlier, tmp_path):
    check_output(earlier, overwrite=False, resume="auto")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="no checkpoint to go on from"):
        check_output(tmp_path / "model", overwrite=False, resume="auto")
    with pytest.raises(NotADirectoryError, match="is a file"):
        check_output(tmp_path / "model/config.json", overwrite=True)
    arguments = upcycle.UpcycleArguments("x", config={})
    data = upcycle.DataArguments(["x"])
    with pytest.raises(FileExistsError, match="is not empty"):
        upcycle.upcycle_model(arguments, data, TrainingArguments(str(tmp_path / "model"), use_cpu=True))


def test_the_demo_replaces_a_demo_alone(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError, match="no demo wrote"):
        demo.demo(tmp_path, 1, 1)
    (tmp_path / "summary.json").write_text('{"mine": 1}')
    with pytest.raises(FileExistsError, match="no demo wrote"):
        demo.check_folder(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"lm_eval": {"task": demo.TASK}}))
    demo.check_folder(tmp_path)
    demo.check_folder(tmp_path / "new")
    with pytest.raises(NotADirectoryError):
        demo.check_folder(tmp_path / "summary.json")


def test_tokenizers_trees_and_pictures_stay(texts, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("mine")
    monkeypatch.setattr("sys.argv", ["train_tokenizer.py", str(tmp_path), texts])
    with pytest.raises(FileExistsError, match="--overwrite"):
        train_tokenizer.main()
    (tmp_path / "listops-1000").mkdir()
    (tmp_path / "listops-1000/basic_val.tsv").write_text("mine")
    with pytest.raises(FileExistsError, match="basic_val"):
        listops.write(tmp_path, (1, 1, 1))
    (tmp_path / "extrapolation.png").write_text("mine")
    with pytest.raises(FileExistsError, match=r"extrapolation\.png"):
        evaluate_lm.evaluate(evaluate_lm.EvaluationArguments(str(tmp_path), [texts]))


def test_a_trained_tokenizer_leaves_the_length_unset(texts, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_tokenizer.py", str(tmp_path / "new"), texts, "--vocab-size", "320"])
    train_tokenizer.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer.model_max_length == VERY_LARGE_INTEGER and len(tokenizer) == 320


def test_settings_may_all_be_pairs(texts):
    pairs = [*GOOD, f"train_files=[{texts}]", "config.hidden_size=16", "activation_checkpointing=true"]
    model, data, training = read_settings("pretrain_clm.py", CLM_CLASSES, pairs)
    assert (model.config, data.train_files) == ({"hidden_size": 16}, [texts])
    enabled = getattr(training, "activation_checkpointing", None) or training.gradient_checkpointing
    assert enabled is True


def test_fields_that_several_families_take():
    check_config("gpt2", {"hidden_size": 8, "n_layer": 1})
    check_config("llama", {"rope_theta": 1e4, "num_labels": 3})
    check_config("spade", {"num_labels": 3}, "spade-lra-text-chunk")
    with pytest.raises(ValueError, match="has none"):
        check_config("llama", {}, "1b")


def test_sharding_that_cpus_do_not_get_is_said(monkeypatch, capsys, tmp_path):
    from _lib.training import Trainer

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", **TINY, vocab_size=30))
    monkeypatch.setattr("transformers.Trainer.__init__", lambda self, model, args: setattr(self, "args", args))
    monkeypatch.setattr(Trainer, "remove_callback", lambda *_: None)
    monkeypatch.setattr(Trainer, "add_callback", lambda *_: None)
    Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    assert "accelerate makes DDP of it" in capsys.readouterr().out
