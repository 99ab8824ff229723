"""`hf-hybrid-ssm upcycle`: a student in an ordinary folder or as a delta, measured, and nothing replaced unasked."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from _lib.standard_text import standard_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub import check_contents
from hf_hybrid_ssm.hub.tables import tables_of
from hf_hybrid_ssm.upcycle import load_teacher_model, loading, upcycle
from tests.upcycle.teacher_files import save_teacher, write_gguf

WINDOW = 300  # a text with a number to find takes most of it, in the few tokens that this tokenizer has
SHORT = {"max_position_embeddings": 1500}  # of 1 and 4 windows, not of 8


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("upcycle")
    save_teacher(folder / "teacher", **SHORT)
    (folder / "text.txt").write_text("\n".join(standard_documents(most=8)[0]["text"])[:12000], encoding="utf-8")
    return folder


def run(made, out, *options, teacher="teacher"):
    return main(["upcycle", str(made / teacher), str(out), "--window", str(WINDOW), "--device", "cpu", *options])


def test_an_ordinary_folder_and_what_was_measured(made, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(made, out, "--keep", "1,2", "--text", str(made / "text.txt"), "--needles", "2") == 0
    shown = capsys.readouterr()
    assert "of the teacher's tensors carry over" in shown.err
    assert check_contents(out)["code"] > 0
    teacher = load_teacher_model(made / "teacher")
    fields = {"others_as": "sliding_attention", "sliding_window": WINDOW + 1}
    tokenizer = AutoTokenizer.from_pretrained(made / "teacher")
    wanted, _ = upcycle(teacher, [1, 2], "full_attention", tokenizer=tokenizer, **fields)
    found = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    assert found.config.block_types == ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert AutoTokenizer.from_pretrained(out, config=found.config).chat_template
    cache, loss, needles = tables_of(json.loads((out / "results.json").read_text()))
    assert [float(row[-1].replace(",", "")) for row in cache.rows] == [32.0, pytest.approx(16.1, abs=0.2)]
    assert "MiB, in float32, by" in cache.title
    assert loss.columns == ["model", "75-300", "300-600", "600-1200", "1200-2400"]
    assert loss.rows[0][1] == loss.rows[1][1] != loss.rows[1][2]  # within the window the student is its teacher
    assert needles.columns == ["model", "300", "1,200"] and all(row[1][0] in "012" for row in needles.rows)
    card = (out / "README.md").read_text()
    for table in (cache, loss, needles):
        assert str(table) in card and str(table) in shown.out
    trained = card.split("## Training\n\n")[1].split("\n\n##")[0]
    assert trained == "Nothing was trained; the weights come from teacher." and "'rows'" not in card


def test_the_caches_are_counted_in_the_dtype_of_the_student(made, tmp_path):
    """The teacher's too, or the two rows could not be compared."""
    assert run(made, tmp_path / "out", "--keep", "1,2", "--needles", "0", "--dtype", "bfloat16") == 0
    (cache,) = tables_of(json.loads((tmp_path / "out/results.json").read_text()))
    assert "MiB, in bfloat16, by" in cache.title
    assert [float(row[-1].replace(",", "")) for row in cache.rows] == [16.0, pytest.approx(8.05, abs=0.1)]


def test_single_groups(made, tmp_path, capsys):
    """The folder is that of `upcycle`, whole or as a delta; the cache grows by one group of each of two layers."""
    out, delta = tmp_path / "out", tmp_path / "delta"
    for folder, options in ((out, []), (delta, ["--delta"])):
        assert run(made, folder, "--keep", "1:1,2:0", "--needles", "1", *options) == 0
    assert "kept (list): 1:1, 2:0" in capsys.readouterr().out
    found = AutoModelForCausalLM.from_pretrained(out)
    assert found.config.full_attention_groups == [[], [1], [0], []]
    tokenizer = AutoTokenizer.from_pretrained(made / "teacher")
    wanted, _ = upcycle(
        load_teacher_model(made / "teacher"), [(1, 1), (2, 0)], tokenizer=tokenizer, sliding_window=WINDOW + 1
    )
    for student in (found, AutoModelForCausalLM.from_pretrained(delta, teacher=made / "teacher")):
        torch.testing.assert_close(student.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    cache, *_ = tables_of(json.loads((out / "results.json").read_text()))
    assert [float(row[-1].replace(",", "")) for row in cache.rows] == [32.0, pytest.approx(8.1, abs=0.2)]
    assert "full attention in some heads" in (out / "README.md").read_text()


@pytest.mark.parametrize("source", ["teacher", "teacher.gguf"])
def test_a_delta(source, made, tmp_path):
    if source.endswith("gguf"):
        write_gguf(made / source, keys={"llama.context_length": 1500})
    out = tmp_path / "out"
    options = ["--family", "bst", "--memory", "--delta", "--needles", "0"]
    assert run(made, out, *options, teacher=source) == 0
    assert not list(out.glob("model*.safetensors")) and check_contents(out)["files"] == 1
    found = AutoModelForCausalLM.from_pretrained(out, teacher=made / source)
    assert found.config.sliding_window == WINDOW and found.config.block_types.count("bst") == 1
    assert f"`{source}`" in (out / "README.md").read_text()
    whole = tmp_path / "whole"
    assert run(made, whole, *options[:3], *options[4:], teacher=source) == 0
    other = AutoModelForCausalLM.from_pretrained(whole)
    carried = json.loads((out / "delta.json").read_text())["carried"]
    assert carried and all(torch.equal(found.state_dict()[name], other.state_dict()[name]) for name in carried)


@pytest.mark.parametrize(
    "options", [["--keep", "0"], ["--family", "bst"], ["--family", "bst", "--memory"]], ids=" ".join
)
def test_needles_of_a_student_whose_positions_have_no_end(options, made, tmp_path):
    """Without full attention a configuration may have no greatest position: the teacher's limit decides."""
    assert run(made, tmp_path / "out", *options, "--needles", "1") == 0
    *_, needles = tables_of(json.loads((tmp_path / "out/results.json").read_text()))
    assert needles.columns == ["model", "300", "1,200"] and len(needles.rows) == 2


def test_training_by_the_recipe(made, tmp_path, capsys):
    texts, _ = standard_documents(most=8)
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text[:3000]}) for text in texts["text"]), encoding="utf-8")
    settings = [f"train_files=[{file}]", "sequence_length=64", "align.max_steps=2", "trained=new"]
    settings += ["per_device_train_batch_size=2", "use_cpu=true", "disable_tqdm=true", "report_to=none"]
    out, options = tmp_path / "out", ["--memory", "--keep", "1", "--keep-by", "even", "--delta", "--needles", "0"]
    command = ["upcycle", str(made / "teacher"), str(out), "--window", "16", "--device", "cpu", *options]
    assert main([*command, "--train", *settings]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["steps"] == 2 and results["tables"] and results["kept_attention_layers"] == [2]
    student = AutoModelForCausalLM.from_pretrained(out, teacher=made / "teacher")
    assert student.config.block_types.count("hybrid_sliding") == 3 and student.config.sliding_window == 17
    card = (out / "README.md").read_text()
    assert "loss after align" in card and "Nothing was trained" not in card and "'rows'" not in card
    with pytest.raises(SystemExit, match="sequence_length=20 must be at least 32"):
        main([*command, "--overwrite", "--train", *settings, "sequence_length=20"])


def test_lengths_with_no_room_for_a_number_are_left_out(made, tmp_path, capsys):
    """Of this tokenizer a number, its question and the template are more than 150 tokens."""
    command = ["upcycle", str(made / "teacher"), str(tmp_path / "out"), "--window", "100", "--device", "cpu"]
    assert main([*command, "--keep", "1", "--keep-by", "even", "--needles", "2"]) == 0
    assert "no needles in 100 tokens: too short" in capsys.readouterr().err
    *_, needles = tables_of(json.loads((tmp_path / "out/results.json").read_text()))
    assert needles.columns == ["model", "400", "800"]


@pytest.fixture
def without_weights(monkeypatch):
    """What is refused is refused before any weight is read."""

    def read(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr(loading.TeacherFiles, "load_model", read)


SLIDING = {"use_sliding_window": True, "sliding_window": 65}
EARLY = [
    ("teacher", ["--window", "1500"], "--window 1500: .* reads at most 1,500 tokens, and such a window leaves none"),
    ("teacher", ["--window", "10"], r"--window 10: no text of 1, 4 or 8 windows .* or --needles 0\."),
    ("teacher", ["--keep", "9"], "keep=9 must be a count between 0 and 4"),
    ("teacher", ["--keep", "1,9"], r"names \[9\], but the teacher's layers are 0 to 3"),
    ("teacher", ["--keep", "1:2"], r"names \[\(1, 2\)\]"),
    ("teacher", ["--keep", "9", "--keep-by", "group_recall"], "keep=9 must be a count between 0 and 8"),
    ("teacher", ["--text", "short.txt"], "tokens, and at least 1200 are needed"),
    ("no tokenizer", [], "has no tokenizer"),
    ("sliding", ["--window", "65"], "--window 65: .* see 64 tokens before their own, .* Give --window 64 or less"),
    ("sliding", ["--window", "65", "--family", "bst"], "Give --window 64 or less"),
    ("sliding", ["--window", "64"], "--keep: layer 2 of .* would not if it is kept: give --keep 0"),
    ("half sliding", ["--window", "64", "--keep", "1,2"], "--keep: layer 2 of .*: name some of 0, 1"),
    ("dynamic", [], "rope_type='dynamic' of the teacher cannot be carried over"),
]


@pytest.fixture(scope="module")
def teachers(made):
    (made / "short.txt").write_text("one two three")
    shutil.copytree(made / "teacher", made / "no tokenizer", ignore=shutil.ignore_patterns("token*", "chat*"))
    save_teacher(made / "sliding", "qwen2", max_window_layers=0, **SLIDING, **SHORT)
    save_teacher(made / "half sliding", "qwen2", max_window_layers=2, **SLIDING, **SHORT)
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


def test_a_sliding_teacher_keeps_its_windows_or_gets_narrower_ones(teachers, tmp_path):
    for name, window, keep in (("sliding", "64", "0"), ("half sliding", "40", "0,1")):
        out = tmp_path / name
        command = ["upcycle", str(teachers / name), str(out), "--window", window, "--device", "cpu", "--needles", "0"]
        assert main([*command, "--keep", keep]) == 0
        config = AutoModelForCausalLM.from_pretrained(out).config
        assert config.sliding_window == int(window) + 1
        kept = 0 if keep == "0" else 2
        assert config.block_types == ["full_attention"] * kept + ["sliding_attention"] * (4 - kept)


UNREAD = {
    "a key": ({"keys": {"llama.expert_count": 4}}, "llama.expert_count=4 is not read"),
    "a part": ({"keys": {"split.count": 2}}, "is part 1 of 2 of a model"),
    "cut off": ({}, "is not a complete GGUF file"),
    "another architecture": ({"architecture": "gpt2"}, "is of the architecture 'gpt2'"),
    "a bias": ({"tensors": {"blk.0.ffn_up.bias": torch.zeros(48)}}, "mlp_bias=True of the teacher cannot be carried"),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_a_gguf_file_is_refused_before_torch_is_imported(kind, tmp_path):
    fields, message = UNREAD[kind]
    path = write_gguf(tmp_path / "teacher.gguf", **fields)
    if kind == "cut off":
        path.write_bytes(path.read_bytes()[:-500])
    code = "import sys\nfrom hf_hybrid_ssm.cli import main\nstatus = main(sys.argv[1:])\n"
    code += "sys.exit(status if not {'torch', 'transformers'} & sys.modules.keys() else 2)"
    command = [sys.executable, "-c", code, "upcycle", str(path), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and message in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


def test_nothing_is_replaced_unasked(made, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert run(made, tmp_path) == 1
    assert "is not empty: name another folder, or give --overwrite" in capsys.readouterr().err
    assert run(made, tmp_path, "--overwrite", "--needles", "0", "--keep", "4", "--delta") == 0
    assert run(made, tmp_path, "--overwrite", "--needles", "0", "--keep", "4") == 0
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "delta.json").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family", "bst", "--keep", "2"], "--keep and --keep-by are for a longhorn"),
        (["--keep", "many"], "many is no count"),
        (
            ["--keep", "1:1,2"],
            "1:1,2 is no count (6), share (0.2), list of layers (7,8,14) or of key/value groups (7:1",
        ),
        (["--keep", "1:1", "--memory"], "--memory stands beside windows of whole layers"),
        (["--keep-by", "group_recall", "--memory"], "--memory stands beside windows of whole layers"),
        (["--needles", "-1"], "--needles -1 must not be negative"),
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
    (tmp_path / "short.txt").write_text("one two three")
    for options, message in (
        (["--text", str(tmp_path / "none.txt")], "is not a file"),
        (["--text", str(tmp_path / "short.txt")], "tokens, and at least 1200 are needed"),
        (["--keep", "9"], "9"),
        (
            ["--keep", "1:2"],
            "names [(1, 2)], but the teacher's layers are 0 to 3, each with the key/value groups 0 to 1",
        ),
        (["--keep", "1", "--keep-by", "recall"], "recalls"),
    ):
        assert run(made, tmp_path / "out", *options) == 1
        said = capsys.readouterr().err
        assert message in said.splitlines()[-1] and said.splitlines()[-1].startswith("hf-hybrid-ssm upcycle: ")
        assert not (tmp_path / "out").exists()
    assert main(["upcycle", str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 1
    assert "there is no such file" in capsys.readouterr().err
