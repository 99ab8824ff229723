"""`hf-hybrid-ssm upcycle`: a student in an ordinary folder or as a delta, measured, and nothing replaced unasked."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from _lib.standard_text import standard_documents
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub import check_contents
from hf_hybrid_ssm.hub.tables import tables_of
from hf_hybrid_ssm.upcycle import Keep, load_teacher, loading, upcycle
from tests.students.teachers import MIXED, SIZES, TEACHERS
from tests.upcycle.teacher_files import save_teacher, tokenizer_of_tests, write_gguf

WINDOW = 300
SHORT = {"max_position_embeddings": 1500}  # of 4 windows, not of 8
FACTS = ["model", "right of 6 in 1,200 tokens, 95 %", "of teacher's"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("upcycle")
    save_teacher(folder / "teacher", **SHORT)
    write_text(folder)
    return folder


def write_text(folder):
    (folder / "text.txt").write_text("\n".join(standard_documents(most=8)[0]["text"])[:12000], encoding="utf-8")


def save_any(folder, model_type, **fields):
    """A random decoder of a model type, with a tokenizer."""
    tokenizer = tokenizer_of_tests()
    end = tokenizer.eos_token_id
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | tokens | SHORT | TEACHERS.get(model_type, {}) | fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(made, out, *options, teacher="teacher"):
    """With a text, so that the teacher need not write one to test the sinks."""
    command = ["upcycle", str(made / teacher), str(out), "--window", str(WINDOW), "--device", "cpu"]
    return main([*command, "--text", str(made / "text.txt"), *options])


def test_an_ordinary_folder_and_what_was_measured(made, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(made, out, "--keep", "1,2", "--recall-texts", "2") == 0
    shown = capsys.readouterr()
    assert "tensors are the teacher's, 4 of the student's are new" in shown.err  # keys and values of two sinks
    assert re.search(r"Constant sinks hold \(.* over 512 tokens\)", shown.err)
    assert check_contents(out)["code"] > 0
    wanted, _ = upcycle(load_teacher(made / "teacher"), Keep([1, 2], window=WINDOW))
    found = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    assert [layer.attention for layer in found.config.plan.layers] == ["window", "full", "full", "window"]
    assert found.config.student == wanted.config.student and found.config.plan.layers[0].window == WINDOW
    assert AutoTokenizer.from_pretrained(out, config=found.config).chat_template
    cache, loss, facts = tables_of(json.loads((out / "results.json").read_text()))
    assert [float(row[-1].replace(",", "")) for row in cache.rows] == [32.0, pytest.approx(16.1, abs=0.2)]
    assert "MiB, in float32, by" in cache.title
    assert loss.columns == ["model", "75-300", "300-600", "600-1200", "1200-2400"]
    assert loss.rows[0][1] == loss.rows[1][1] != loss.rows[1][2]  # within the window the student is its teacher
    assert facts.columns == [FACTS[0], FACTS[1].replace("6", "12"), FACTS[2]]
    assert [row[0] for row in facts.rows] == ["teacher", "student"] and all("0%" in row[1] for row in facts.rows)
    card = (out / "README.md").read_text()
    for table in (cache, loss, facts):
        assert str(table) in card and str(table) in shown.out
    trained = card.split("## Training\n\n")[1].split("\n\n##")[0]
    assert trained == "Nothing was trained; the weights come from teacher." and "'rows'" not in card


def test_the_caches_are_counted_in_the_dtype_of_the_student(made, tmp_path):
    """The teacher's too, or the two rows could not be compared."""
    assert run(made, tmp_path / "out", "--keep", "1,2", "--recall-texts", "0", "--dtype", "bfloat16") == 0
    cache, _ = tables_of(json.loads((tmp_path / "out/results.json").read_text()))
    assert "MiB, in bfloat16, by" in cache.title
    assert [float(row[-1].replace(",", "")) for row in cache.rows] == [16.0, pytest.approx(8.05, abs=0.1)]


def test_single_groups(made, tmp_path, capsys):
    """The folder is that of `upcycle`, whole or as a delta; the cache grows by one group of each of two layers."""
    out, delta = tmp_path / "out", tmp_path / "delta"
    for folder, options in ((out, []), (delta, ["--delta"])):
        assert run(made, folder, "--keep", "1:1,2:0", "--recall-texts", "1", *options) == 0
    assert "kept (list): 1:1, 2:0" in capsys.readouterr().out
    found = AutoModelForCausalLM.from_pretrained(out)
    assert [layer.groups for layer in found.config.plan.layers] == [(), (1,), (0,), ()]
    wanted, _ = upcycle(load_teacher(made / "teacher"), Keep([(1, 1), (2, 0)], window=WINDOW))
    for student in (found, AutoModelForCausalLM.from_pretrained(delta, teacher=made / "teacher")):
        torch.testing.assert_close(student.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    cache, *_ = tables_of(json.loads((out / "results.json").read_text()))
    assert [float(row[-1].replace(",", "")) for row in cache.rows] == [32.0, pytest.approx(8.1, abs=0.2)]


@pytest.mark.parametrize("source", ["teacher", "teacher.gguf"])
def test_a_delta(source, made, tmp_path):
    if source.endswith("gguf"):
        write_gguf(made / source, keys={"llama.context_length": 1500})
    out = tmp_path / "out"
    options = ["--keep", "0", "--memory", "context", "--recall-texts", "0"]
    assert run(made, out, *options, "--delta", teacher=source) == 0
    assert not list(out.glob("model*.safetensors")) and check_contents(out)["files"] == 1
    found = AutoModelForCausalLM.from_pretrained(out, teacher=made / source)
    assert {(layer.window, layer.memory) for layer in found.config.plan.layers} == {(WINDOW, "context")}
    assert f"`{source}`" in (out / "README.md").read_text()
    whole = tmp_path / "whole"
    assert run(made, whole, *options, teacher=source) == 0
    own = load_teacher(made / source).model.state_dict()
    theirs, ours = (model.state_dict() for model in (AutoModelForCausalLM.from_pretrained(whole), found))
    assert theirs.keys() == ours.keys() and all(torch.equal(ours[name], own[name]) for name in own)


@pytest.mark.parametrize(
    "options", [["--keep", "0"], ["--keep", "0", "--memory"], ["--keep", "1:1", "--memory"]], ids=" ".join
)
def test_facts_of_windows_with_a_memory_and_without(options, made, tmp_path):
    assert run(made, tmp_path / "out", *options, "--recall-texts", "1") == 0
    *_, facts = tables_of(json.loads((tmp_path / "out/results.json").read_text()))
    assert facts.columns == FACTS and len(facts.rows) == 2


def test_training_by_the_recipe(made, tmp_path, capsys):
    texts, _ = standard_documents(most=8)
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text[:3000]}) for text in texts["text"]), encoding="utf-8")
    settings = [f"train_files=[{file}]", "sequence_length=64", "align.max_steps=2", "trained=new"]
    settings += ["per_device_train_batch_size=2", "use_cpu=true", "disable_tqdm=true", "report_to=none"]
    out, options = tmp_path / "out", ["--memory", "--keep", "1", "--keep-by", "even", "--delta", "--recall-texts", "0"]
    command = ["upcycle", str(made / "teacher"), str(out), "--window", "16", "--device", "cpu", *options]
    assert main([*command, "--train", *settings]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["steps"] == 2 and results["tables"] and results["kept_attention_layers"] == [2]
    student = AutoModelForCausalLM.from_pretrained(out, teacher=made / "teacher")
    assert [(layer.window, layer.memory) for layer in student.config.plan.layers].count((16, "longhorn")) == 3
    card = (out / "README.md").read_text()
    assert "loss after align" in card and "Nothing was trained" not in card and "'rows'" not in card
    with pytest.raises(SystemExit, match="sequence_length=20 must be at least 32"):
        main([*command, "--overwrite", "--train", *settings, "sequence_length=20"])


def test_lengths_with_no_room_for_facts_are_left_out(made, tmp_path, capsys):
    command = ["upcycle", str(made / "teacher"), str(tmp_path / "out"), "--window", "100", "--device", "cpu"]
    assert main([*command, "--keep", "1", "--keep-by", "even", "--recall-texts", "2"]) == 0
    assert "no facts in 400 tokens: too short" in capsys.readouterr().err
    *_, facts = tables_of(json.loads((tmp_path / "out/results.json").read_text()))
    assert facts.columns[1:] == ["right of 12 in 800 tokens, 95 %", "of teacher's"]


@pytest.fixture
def without_weights(monkeypatch):
    """What is refused is refused before any weight is read."""

    def read(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr(loading.TeacherFiles, "load_model", read)


EARLY = [
    ("teacher", ["--window", "1500"], "--window 1500: .* reads at most 1,500 tokens, and such a window leaves none"),
    ("teacher", ["--window", "10"], r"--window 10: no text of 4 or 8 windows .* or --recall-texts 0\."),
    ("teacher", ["--keep", "9"], "keep=9 must be a count between 0 and 4"),
    ("teacher", ["--keep", "1,9"], "names 9, but the teacher sees all tokens in the layers 0, 1, 2, 3"),
    ("teacher", ["--keep", "1:2"], "names 1:2, but .* layers 0, 1, 2, 3, each with the key/value groups 0 to 1"),
    ("teacher", ["--keep", "9", "--keep-by", "group_recall"], "keep=9 must be a count between 0 and 8"),
    ("teacher", ["--text", "short.txt"], "tokens, and at least 1200 are needed"),
    ("no tokenizer", [], "has no tokenizer"),
    ("mixed", ["--keep", "0,1"], "names 0, but the teacher sees all tokens in the layers 1, 3"),
    ("sliding", ["--keep", "0"], "no layer of the teacher .* sees all tokens: its cache does not grow"),
    ("dynamic", [], "rope_type='dynamic' turns keys by the length of the text"),
    ("gpt2", [], "model_type='gpt2' cannot be a teacher: its positions are not rotary.* Take another decoder"),
    ("fused", ["--memory"], "stands beside attention of k_proj, o_proj, q_proj, v_proj"),
]


@pytest.fixture(scope="module")
def teachers(made):
    (made / "short.txt").write_text("one two three")
    shutil.copytree(made / "teacher", made / "no tokenizer", ignore=shutil.ignore_patterns("token*", "chat*"))
    save_any(made / "mixed", "gemma3_text")
    save_any(made / "sliding", "mistral", sliding_window=65)
    save_any(made / "fused", "phi3")
    save_any(made / "gpt2", "gpt2")
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    save_teacher(made / "dynamic", rope_parameters=dynamic, **SHORT)
    return made


@pytest.mark.parametrize(("name", "options", "message"), EARLY)
@pytest.mark.usefixtures("without_weights")
def test_what_cannot_be_is_refused_before_weights_are_read(name, options, message, teachers, tmp_path, capsys):
    options = [str(teachers / option) if option == "short.txt" else option for option in options]
    assert run(teachers, tmp_path / "out", *options, teacher=name) == 1
    *_, said = capsys.readouterr().err.splitlines()
    assert re.search(message, said) and said.startswith("hf-hybrid-ssm upcycle: ") and not (tmp_path / "out").exists()


def test_windows_of_the_teacher_stay_as_they_are(teachers, tmp_path):
    """They are narrower than --window, which is for the layers that see all tokens."""
    assert run(teachers, tmp_path / "out", "--keep", "[3]", "--recall-texts", "1", teacher="mixed") == 0
    layers = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.plan.layers
    reach = MIXED["sliding_window"] - 1
    assert [(layer.attention, layer.window) for layer in layers[:2]] == [("window", reach), ("window", WINDOW)]
    assert layers[2] == layers[0] and layers[3].attention == "full"


@pytest.mark.parametrize("model_type", ["qwen3", "olmo2", "smollm3", "granite", "mixtral"])
def test_any_decoder_can_be_the_teacher(model_type, tmp_path, capsys):
    """The student is of its class, and within the window its function."""
    write_text(tmp_path)
    save_any(tmp_path / "teacher", model_type)
    assert run(tmp_path, tmp_path / "out", "--keep", "1", "--keep-by", "even", "--recall-texts", "1", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["folder"] == str(tmp_path / "out") and said["teacher"] == "teacher"
    assert [layer["attention"] for layer in said["student"]["layers"]] == ["window", "window", "full", "window"]
    cache, _, facts = tables_of(said)
    assert facts.columns == FACTS and len(cache.rows) == 2
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("teacher", "out")]
    assert isinstance(models[1], type(models[0]))
    ids = torch.randint(3, 200, (1, WINDOW), generator=torch.Generator().manual_seed(0))
    teacher, student = (model(ids).logits for model in models)
    torch.testing.assert_close(student[:, :100], teacher[:, :100], rtol=1e-4, atol=1e-4)


UNREAD = {
    "a key": ({"keys": {"llama.expert_count": 4}}, "llama.expert_count=4 is not read"),
    "a part": ({"keys": {"split.count": 2}}, "is part 1 of 2 of a model"),
    "cut off": ({}, "is not a complete GGUF file"),
    "another architecture": ({"architecture": "gpt2"}, "is of the architecture 'gpt2'"),
    "no package": ({}, "reading teacher.gguf needs gguf: pip install"),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_a_gguf_file_is_refused_before_torch_is_imported(kind, tmp_path):
    fields, message = UNREAD[kind]
    path = write_gguf(tmp_path / "teacher.gguf", **fields)
    if kind == "cut off":
        path.write_bytes(path.read_bytes()[:-500])
    code = "import sys\nsys.modules['gguf'] = None\n" if kind == "no package" else "import sys\n"
    code += "from hf_hybrid_ssm.cli import main\nstatus = main(sys.argv[1:])\n"
    code += "sys.exit(status if not {'torch', 'transformers'} & sys.modules.keys() else 2)"
    command = [sys.executable, "-c", code, "upcycle", str(path), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and message in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


def test_nothing_is_replaced_unasked(made, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert run(made, tmp_path) == 1
    assert "is not empty: name another folder, or give --overwrite" in capsys.readouterr().err
    assert run(made, tmp_path, "--overwrite", "--recall-texts", "0", "--keep", "4", "--delta") == 0
    assert run(made, tmp_path, "--overwrite", "--recall-texts", "0", "--keep", "4") == 0
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "delta.json").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "elephant"], "invalid choice: 'elephant'"),
        (["--keep", "many"], "many is no count"),
        (
            ["--keep", "1:1,2"],
            "1:1,2 is no count (6), share (0.2), list of layers (7,8,14) or of key/value groups (7:1",
        ),
        (["--recall-texts", "-1"], "--recall-texts -1 must not be negative"),
        (["--train", "quickly"], "--train quickly: key=value was expected"),
        (["--dtype", "bfloat16", "--train", "a=b"], "--dtype is for a student that is not trained"),
        (["--device", "abacus"], "is not a device of torch"),
    ],
)
def test_wrong_usage(options, message, made, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(made, tmp_path / "out", *options)
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_wrong_input_is_one_line(made, tmp_path, capsys):
    for options, message in (
        (["--text", str(tmp_path / "none.txt")], "is not a file"),
        (["--keep", "1", "--keep-by", "recall"], "recalls"),
    ):
        assert run(made, tmp_path / "out", *options) == 1
        said = capsys.readouterr().err
        assert message in said.splitlines()[-1] and said.splitlines()[-1].startswith("hf-hybrid-ssm upcycle: ")
        assert not (tmp_path / "out").exists()
    assert main(["upcycle", str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 1
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("pair", ["delta=true", "window=32", "output-dir=elsewhere", "keep=[1]"])
def test_what_the_command_says_is_not_said_again_to_the_recipe(pair, made, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["upcycle", str(made / "teacher"), str(tmp_path / "out"), "--train", "train_files=[x.txt]", pair])
    assert end.value.code == 2 and "instead" in capsys.readouterr().err


def test_a_teacher_is_not_written_over(made, capsys):
    held = {path.name for path in (made / "teacher").iterdir()}
    assert main(["upcycle", str(made / "teacher"), str(made / "teacher"), "--delta", "--overwrite"]) != 0
    assert "is the teacher's own folder" in capsys.readouterr().err
    assert {path.name for path in (made / "teacher").iterdir()} == held


def test_a_rounded_student_is_measured_as_it_is_loaded(made, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "hf_hybrid_ssm.cli.upcycle._measure", lambda args, student, *rest: measured.append(student) or {}
    )
    options = ["--recall-texts", "0", "--keep-by", "even", "--window", "16", "--dtype", "bfloat16"]
    assert main(["upcycle", str(made / "teacher"), str(tmp_path / "out"), *options]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = dict(found.named_buffers())
    assert wanted and found.dtype == torch.bfloat16
    for name, buffer in measured[0].named_buffers():
        assert buffer.dtype == wanted[name].dtype and torch.equal(buffer, wanted[name]), name
