"""The recipe: every stage learns, a killed run goes on, and the result is an ordinary checkpoint."""

import json
import random
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from _lib.documents import DataArguments, train_tokenizer
from _lib.recall_rows import with_recall_rows
from _lib.stages import TeacherStates
from datasets import Dataset
from pretrain_clm import ModelArguments, pretrain
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from upcycle import UpcycleArguments, upcycle_model
from upcycling_gaps import GapArguments, gaps, widened

from hf_hybrid_ssm.upcycle import Keep, Teacher, upcycle
from hf_hybrid_ssm.upcycle.student import constant_sinks
from tests.recipes import small

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.standard_texts(tmp_path_factory.mktemp("texts"))


def data_of(texts, sequence_length=64):
    files = {"train_files": [f"{texts}/train.jsonl"], "validation_files": [f"{texts}/held_out.jsonl"]}
    return DataArguments(**files, sequence_length=sequence_length, tokenizer_vocab_size=400)


def training(output, **options):
    fixed = {"per_device_train_batch_size": 4, "logging_steps": 10, "save_steps": 10, "learning_rate": 3e-3}
    return small.training(output, **fixed | options)


@pytest.fixture(scope="module")
def teacher(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    pretrain(ModelArguments(model_type="llama", config=SIZES), data_of(texts), training(folder, max_steps=60))
    return folder


@pytest.fixture(scope="module")
def arguments(teacher):
    stages = {"align": {"max_steps": 20}, "distil": {"max_steps": 20, "eval_strategy": "steps", "eval_steps": 10}}
    memory = {"memory": "longhorn", "instead": True, "config": {"state_size": 8}}
    return UpcycleArguments(str(teacher), keep=0.25, keep_by="even", **memory, **stages)


@pytest.fixture(scope="module")
def whole(arguments, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    return folder, upcycle_model(arguments, data_of(texts), training(folder))


def test_every_stage_learns(whole):
    folder, results = whole
    for stage in ("align", "distil"):
        first, last = (
            entry["loss"]
            for entry in json.loads((folder / stage / "stage.json").read_text())["history"]
            if "loss" in entry
        )
        assert last < first
    assert results["validation_loss"] == results["loss_after_distil"] != results["loss_after_align"]
    assert results["kept_attention_layers"] == [2] and results["layers_with_memory"] == [0, 1, 3]
    assert results["steps"] == 40 and results["tokens"] == 40 * 4 * 64
    assert json.loads((folder / "results.json").read_text()) == results
    assert (folder / "gap.png").stat().st_size > 1000


def test_the_result_is_an_ordinary_checkpoint_whose_card_names_the_teacher(whole, teacher):
    folder, _ = whole
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert [layer.memory for layer in model.config.plan.layers] == ["longhorn", "longhorn", None, "longhorn"]
    card = (folder / "README.md").read_text()
    assert f"| teacher | {teacher.name} |" in card and "perplexity over teachers" in card
    # no state is kept while a stage trains; what it leaves generates from one again
    for saved in (folder, folder / "align", folder / "distil"):
        assert json.loads((saved / "config.json").read_text())["use_cache"] is True, saved


def test_a_killed_run_goes_on_to_the_same_bits(whole, arguments, texts, tmp_path):
    folder, results = whole
    shutil.copytree(folder / "align", tmp_path / "align")
    (tmp_path / "distil").mkdir()
    shutil.copytree(folder / "distil/checkpoint-10", tmp_path / "distil/checkpoint-10")
    again = upcycle_model(arguments, data_of(texts), training(tmp_path))
    assert again == results
    first, second = (load_file(where / "model.safetensors") for where in (folder, tmp_path))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_run_goes_on_as_it_was_begun_or_not_at_all(whole, arguments, texts, teacher, tmp_path):
    """A stage that was finished, and one that was stopped."""
    for stage in ("align", "distil"):
        shutil.copytree(whole[0] / stage, tmp_path / stage)
    (tmp_path / "distil/stage.json").unlink()
    others = {
        "max_steps": replace(arguments, distil={"max_steps": 21}),
        "keep, keep_by": replace(arguments, keep=[1], keep_by=None),
        "align, max_steps": replace(arguments, align={"max_steps": 3}),
        "temperature": replace(arguments, temperature=2.0),
    }
    for names, other in others.items():
        with pytest.raises(
            ValueError, match=rf"begun with other settings \(.*{names.split(', ')[-1]}.*\): give those"
        ):
            upcycle_model(other, data_of(texts), training(tmp_path))
    with pytest.raises(ValueError, match=r"\(seed\)"):
        upcycle_model(arguments, data_of(texts), training(tmp_path, seed=7))
    with pytest.raises(ValueError, match=r"\(sequence_length\)"):
        upcycle_model(arguments, data_of(texts, 48), training(tmp_path))
    upcycle_model(arguments, data_of(texts), training(tmp_path, logging_steps=3))


def test_lora_leaves_what_came_from_the_teacher_merged(arguments, texts, teacher, tmp_path):
    light = replace(
        arguments, align=None, distil=None, finetune={"max_steps": 4}, lora_rank=2, keep_by="sensitivity", keep=0.5
    )
    results = upcycle_model(light, data_of(texts), training(tmp_path))
    assert len(results["kept_attention_layers"]) == 2 and results["steps"] == 4
    old, new = (load_file(where / "model.safetensors") for where in (teacher, tmp_path))
    assert torch.equal(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"])
    assert not torch.equal(old["model.layers.0.mlp.up_proj.weight"], new["model.layers.0.mlp.up_proj.weight"])
    assert not any("lora" in key for key in new)


BESIDE = {"keep": 0, "window": 16, "memory_layers": [1, 3]}
MEMORIES = {
    "context": {"memory": "context", "config": {"ssm_state_size": 4}} | BESIDE,
    "longhorn": {"memory": "longhorn"} | BESIDE,
}


@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_beside_windows_goes_through_every_stage(memory, lora_rank, texts, teacher, tmp_path):
    stages = {"align": {"max_steps": 10}, "distil": {"max_steps": 4}, "finetune": {"max_steps": 4}}
    arguments = UpcycleArguments(str(teacher), lora_rank=lora_rank, **MEMORIES[memory], **stages)
    results = upcycle_model(arguments, data_of(texts), training(tmp_path))
    assert results["memory"] == memory and results["layers_with_memory"] == [1, 3]
    assert results["steps"] == 18 and results["loss_after_align"] != results["loss_before_training"]
    plan = AutoModelForCausalLM.from_pretrained(tmp_path).config.plan
    assert [(layer.window, layer.memory) for layer in plan.layers] == [(16, None), (16, memory)] * 2
    old, aligned, new = (load_file(where / "model.safetensors") for where in (teacher, tmp_path / "align", tmp_path))
    opened = {"context": "memory.o_proj.weight", "longhorn": "memory.out_proj.weight"}[memory]
    assert aligned[f"model.layers.1.self_attn.{opened}"].abs().max() > 0
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        first, then, last = (weights[f"model.layers.1.{name}.weight"] for weights in (old, aligned, new))
        assert torch.equal(first, then) and not torch.equal(then, last)
    assert torch.equal(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"]) == (lora_rank is not None)
    assert not any("lora" in key for key in new)


@pytest.mark.parametrize("stage", ["distil", "finetune"])
@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize("keep", [[1], [[1, 0], [2, 3]]], ids=["layers", "groups"])
def test_kept_layers_without_a_memory_are_trained(keep, lora_rank, stage, texts, teacher, tmp_path):
    """They and all else; what they keep is what was asked."""
    stages = {stage: {"max_steps": 10, "learning_rate": 1e-3}, "within_weight": 0.5, "recall_share": 0.2}
    arguments = UpcycleArguments(str(teacher), keep=keep, window=16, lora_rank=lora_rank, **stages)
    results = upcycle_model(arguments, data_of(texts, 160), training(tmp_path))
    if stage == "finetune":
        assert results["loss_after_finetune"] < results["loss_before_training"]
    assert results["kept_attention_layers"] == ([1] if keep == [1] else [])
    assert results.get("kept_key_value_groups", []) == ([] if keep == [1] else keep)
    old, new = (load_file(where / "model.safetensors") for where in (teacher, tmp_path))
    assert not torch.equal(*(weights["model.layers.1.self_attn.k_proj.weight"] for weights in (old, new)))
    assert not any("memory" in name for name in new)


def new_parts_alone(teacher, **more):
    stages = {"align": {"max_steps": 4}, "distil": {"max_steps": 6}}
    options = {"trained": "new", "within_weight": 0.1} | MEMORIES["context"] | stages
    return UpcycleArguments(str(teacher), **(options | more))


def test_only_what_is_new_is_trained_and_saved_as_a_delta(texts, teacher, tmp_path):
    results = upcycle_model(new_parts_alone(teacher, delta=True), data_of(texts), training(tmp_path))
    said, old = json.loads((tmp_path / "delta.json").read_text()), load_file(teacher / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists() and said["teacher"] == teacher.name
    student = AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teacher).state_dict()
    assert all(torch.equal(student[name], old[name]) for name in old)
    aligned, distilled = (load_file(tmp_path / stage / "model.safetensors") for stage in ("align", "distil"))
    new = {name for name in distilled if not torch.equal(aligned[name], distilled[name])}
    assert all(torch.equal(student[name], distilled[name]) for name in new)
    assert new and all(".layers.1." in name or ".layers.3." in name or ".sink." in name for name in new)
    assert {name for name in distilled if ".sink." in name} <= new
    card = (tmp_path / "README.md").read_text()
    assert "## Teacher" in card and "validation loss" in card and results["steps"] == 10


@pytest.mark.parametrize("keep", [[], [1]], ids=["windows", "a layer kept"])
def test_of_windows_alone_the_sinks_are_what_is_new(keep, texts, teacher, tmp_path):
    fixed = {"trained": "new", "keep": keep, "window": 16, "config": {"sink": "constant"}}
    arguments = UpcycleArguments(str(teacher), distil={"max_steps": 6}, delta=True, **fixed)
    results = upcycle_model(arguments, data_of(texts), training(tmp_path))
    assert results["loss_after_distil"] < results["loss_before_training"]
    assert results["kept_attention_layers"] == keep
    made = Teacher(AutoModelForCausalLM.from_pretrained(teacher))
    first, _ = upcycle(made, Keep(keep, window=16), sink="constant")
    last = AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teacher).state_dict()
    trained = {name for name, value in first.state_dict().items() if not torch.equal(value, last[name])}
    sinks = [f"{name}.{part}" for name in constant_sinks(first) for part in ("key", "value")]
    assert trained == set(sinks) and len(sinks) == 2 * (4 - len(keep))


def test_the_teachers_states_are_kept_and_read_again(texts, teacher, tmp_path, monkeypatch):
    arguments = new_parts_alone(teacher, align=None, teacher_states=str(tmp_path / "states"), recall_share=0.2)
    losses, forwards, keep = {}, [], TeacherStates.of

    def counted(self, rows, compute):
        return keep(self, rows, lambda: forwards.append(1) or compute())

    monkeypatch.setattr(TeacherStates, "of", counted)
    for name in ("first", "second"):
        losses[name] = upcycle_model(arguments, data_of(texts, 160), training(tmp_path / name))["loss_after_distil"]
        forwards.append(name)
    assert losses["first"] == losses["second"]
    assert forwards[-2:] == ["first", "second"] and len(forwards) > 2  # the second time none is computed
    (folder,) = (tmp_path / "states").iterdir()
    about = json.loads((folder / "about.json").read_text())
    assert (folder / "states").stat().st_size == 2 * about["shape"][0] * 160 * 32
    without = new_parts_alone(teacher, align=None, recall_share=0.2)
    loss = upcycle_model(without, data_of(texts, 160), training(tmp_path / "third"))["loss_after_distil"]
    assert loss == pytest.approx(losses["first"], abs=1e-3)  # bfloat16


def test_states_belong_to_the_teacher_and_to_the_rows(texts, teacher, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(teacher)
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]], "position_ids": [[0, 1, 2]] * 2})

    def states_of(model, rows):
        return TeacherStates(tmp_path, model, rows)

    wanted = torch.randn(2, 3, 32)
    order = torch.tensor([1, 0])
    kept = states_of(model, rows).of(order, lambda: wanted)
    assert kept.dtype == torch.bfloat16 and torch.equal(kept, wanted.bfloat16())
    again = states_of(model, rows).of(torch.tensor([0, 1]), lambda: pytest.fail("they are there"))
    assert torch.equal(again, wanted.bfloat16().flip(0))
    other = rows.map(lambda row: {"position_ids": [0, 1, 0]})
    with torch.no_grad():
        moved = AutoModelForCausalLM.from_pretrained(teacher)
        moved.model.norm.weight[0] += 1
    for states in (states_of(model, other), states_of(moved, rows)):
        assert not states.done.any()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(ValueError, match=r"take 0\.0 GB, and 0\.0 GB are free"):
        states_of(model, rows.select([0]))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=200))
    with pytest.raises(ValueError, match="are free"):
        TeacherStates(tmp_path / "new", model, rows)  # of two rows, 384 bytes
    TeacherStates(tmp_path / "new", model, rows, read=1)


FACT = r"The code of (\w+) is (\d{5})"


@pytest.mark.parametrize("named", [True, False])
def test_recall_rows_repeat_what_stood_beyond_the_window(named):
    """Half copy passages, half say facts twice; each repetition stands more than a window after what it repeats."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=5)) for _ in range(150 if named else 3)]
    tokenizer = train_tokenizer([" ".join(["", *words] * 20)], 900)
    length, window = 500, 100
    random_ids = [[draw.randrange(len(tokenizer)) for _ in range(length)] for _ in range(30)]
    positions = list(range(length))
    rows = Dataset.from_list(
        [{"input_ids": ids, "labels": ids, "position_ids": positions, "continues": False} for ids in random_ids]
    )
    mixed = with_recall_rows(rows, tokenizer, 0.25, window=window, seed=1)
    assert len(mixed) == 40 and mixed[:30] == rows[:]
    border = (length - window) // 2
    for number, made in enumerate(mixed.select(range(30, 40))):
        ids = made["input_ids"]
        assert len(ids) == length and made["labels"] == [-100, *ids[1:]] and made["position_ids"] == positions
        early, late = ids[:border], ids[border + window :]
        if named and number % 2:
            said = [set(re.findall(FACT, tokenizer.decode(part))) for part in (early, late)]
            assert said[0] == said[1] != set()
            continue
        size = 8 if number % 2 == 0 else 4
        grams = [{tuple(part[at : at + size]) for at in range(len(part) - size + 1)} for part in (early, late)]
        assert grams[0] & grams[1]
    with pytest.raises(ValueError, match="sequence_length=500 is too short for recall_share"):
        with_recall_rows(rows, tokenizer, 0.25, window=400, seed=1)
    assert with_recall_rows(rows, tokenizer, 0, window=400, seed=1) is rows


def test_new_settings_are_checked_by_name(teacher, texts, tmp_path):
    for given, message in (
        ({"trained": "head"}, "trained='head' must be one of 'all', 'new'"),
        ({"lora_rank": 2}, "lora_rank=2 trains more than trained='new' does"),
        ({"lora_rank": 0, "trained": "all"}, "lora_rank=0 must be at least 1"),
        ({"within_weight": 0.0}, r"within_weight=0\.0 must lie above 0"),
        ({"recall_share": 1.0}, r"recall_share=1\.0 must be at least 0 and below 1"),
        ({"distil": None, "teacher_states": "x"}, "teacher_states='x' are for distil"),
        ({"delta": True, "trained": "all"}, "delta=True leaves out what is as the teacher has it"),
    ):
        with pytest.raises(ValueError, match=message):
            new_parts_alone(teacher, **given)
    windows = {"memory": None, "memory_layers": None, "config": {}, "align": None}
    for given, message in (
        ({"window": 33}, "sequence_length=64 must be at least 66, twice the window"),
        (windows | {"config": {"sink": None}}, "trained='new' has nothing to train"),
        ({"keep": 1.0} | windows | {"trained": "all"}, r"within_weight=0\.1 is for students with windows"),
        (windows | {"align": {"max_steps": 4}}, "align has nothing to train: it teaches a memory"),
        ({"keep": [7]}, "names 7, but the teacher sees all tokens in the layers 0, 1, 2, 3"),
        ({"config": {"ssm_stat_size": 4}}, "ssm_stat_size: BstConfig has no such field"),
        (
            {"memory": None, "align": None},
            "ssm_state_size, memory_layers: of a memory, and there is none; give memory=",
        ),
        ({"memory_layers": [1, 4]}, r"memory_layers=\[1, 4\] names 4, where the teacher does not see all tokens"),
        ({"recall_share": 0.1}, "sequence_length=64 is too short for recall_share"),
    ):
        with pytest.raises(ValueError, match=message):
            upcycle_model(new_parts_alone(teacher, **given), data_of(texts), training(tmp_path))
    data = data_of(texts)
    data.streaming = True
    with pytest.raises(ValueError, match="teacher_states needs rows that stay the same: streaming=false"):
        upcycle_model(new_parts_alone(teacher, teacher_states=str(tmp_path)), data, training(tmp_path))


def test_refusals(teacher, texts, tmp_path):
    with pytest.raises(ValueError, match="by='best'"):
        UpcycleArguments(str(teacher), keep_by="best")
    with pytest.raises(ValueError, match=r"got keep=\[1\]"):
        UpcycleArguments(str(teacher), keep=[1], keep_by="sensitivity")
    with pytest.raises(ValueError, match="temperature=0"):
        UpcycleArguments(str(teacher), temperature=0)
    (tmp_path / "model.safetensors").write_text("something")
    with pytest.raises(FileExistsError, match="output_dir"):
        upcycle_model(UpcycleArguments(str(teacher), resume=False), data_of(texts), training(tmp_path))


def test_a_wider_teacher_is_the_same_function(teacher):
    """Until it is trained: the new units' outputs are zero, their own weights are not, so that they can learn."""
    narrow = AutoModelForCausalLM.from_pretrained(teacher).eval()
    wide = widened(narrow, 100).eval()
    ids = torch.randint(0, narrow.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(wide(ids).logits, narrow(ids).logits, rtol=1e-5, atol=1e-5)
    assert wide.config.intermediate_size == 100 and narrow.config.intermediate_size == 64
    wide(ids, labels=ids).loss.backward()
    mlp = wide.model.layers[0].mlp
    assert (mlp.gate_proj.weight[64:].abs().sum(1) > 0).all() and not mlp.down_proj.weight[:, 64:].any()
    assert mlp.down_proj.weight.grad[:, 64:].any()
    with pytest.raises(ValueError, match=r"intermediate_size=64 must be above the teacher's, 64"):
        widened(narrow, 64)


def test_gaps_compare_students_with_their_teacher(teacher, texts, tmp_path):
    base = {"teacher": str(teacher), "config": {"state_size": 4}, "sequence_length": 32, "use_cpu": True}
    base |= {"memory": "longhorn", "instead": True}
    base |= {"train_files": [f"{texts}/train.jsonl"], "validation_files": [f"{texts}/held_out.jsonl"]}
    base |= {"per_device_train_batch_size": 2, "report_to": "none", "distil": {"max_steps": 2, "learning_rate": 1e-3}}
    variants = {"all": {"keep": 1.0, "distil": {"learning_rate": 0.0}}, "none": {"keep": 0.0}}
    variants |= {"scratch": {"keep": 0.0, "from_scratch": True}, "control": {"teacher_goes_on": True}}
    variants["wider"] = {"teacher_goes_on": True, "intermediate_size": 80}
    held_out = {"heard": [f"{texts}/train.jsonl"], "unheard": [f"{texts}/held_out.jsonl"]}
    arguments = GapArguments(
        base, variants, held_out, "control", [0], 4, 512, str(tmp_path), str(tmp_path / "figures")
    )
    figures = gaps(arguments)
    students = figures["students"]
    assert figures["scored_tokens"] == {"heard": 512, "unheard": 512}
    for found in (figures["teacher"], *(student["runs"][0] for student in students.values())):
        assert found["loss"] == pytest.approx(sum(found["losses"].values()) / 2)
    assert figures["teacher"]["losses"]["heard"] < figures["teacher"]["losses"]["unheard"]
    gap = figures["differences"]["none"]
    assert set(figures["differences"]) == set(variants) - {"control"}
    assert gap["mean"] == gap["pairs"][0] == pytest.approx(students["none"]["loss"] - students["control"]["loss"])
    assert gap["mean"] == pytest.approx(sum(kind["mean"] for kind in gap["by_kind"].values()) / 2)
    assert students["all"]["loss"] == pytest.approx(figures["teacher"]["loss"], abs=1e-5)
    assert students["all"]["perplexity_over_teachers"] == pytest.approx(1.0, abs=1e-5)
    assert students["all"]["cache_bytes"] == figures["teacher"]["cache_bytes"] > students["none"]["cache_bytes"]
    assert students["none"]["loss"] < students["scratch"]["loss"]
    control = students["control"]  # the teacher itself, two steps later
    assert control["cache_bytes"] == figures["teacher"]["cache_bytes"] and control["runs"][0]["tokens"] == 128
    assert 0 < abs(control["loss"] - figures["teacher"]["loss"]) < 1
    more = 4 * 16 * 3 * 32  # layers, units, matrices, width
    assert students["wider"]["runs"][0]["parameters"] == figures["teacher"]["parameters"] + more
    assert 0 < abs(students["wider"]["loss"] - control["loss"]) < 0.5
    assert json.loads((tmp_path / "figures.json").read_text())["students"] == json.loads(json.dumps(students))
    assert (tmp_path / "figures.png").stat().st_size > 1000
    made = (tmp_path / "none-0/results.json").stat().st_mtime_ns
    assert gaps(replace(arguments, files=held_out))["students"] == students
    assert (tmp_path / "none-0/results.json").stat().st_mtime_ns == made
    with pytest.raises(FileExistsError, match="overwrite"):
        gaps(replace(arguments, variants=variants | {"none": {"keep": [0]}}))
