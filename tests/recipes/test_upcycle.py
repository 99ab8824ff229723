"""The recipe: every stage learns, a killed run goes on, and the result is an ordinary checkpoint."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import upcycle
from _lib.documents import DataArguments
from _lib.standard_text import standard_documents
from datasets import Dataset
from pretrain_clm import ModelArguments, pretrain
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments
from upcycle import UpcycleArguments, upcycle_model
from upcycling_gaps import GapArguments, gaps, widened

from hf_hybrid_ssm.upcycle import recall_prompts
from tests.upcycle.recalling_teacher import VOCAB, recalling_teacher

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    train, held_out = standard_documents(most=60)  # more than are taken here
    for name, documents in (("train", train.select(range(20))), ("held_out", held_out.select(range(4)))):
        rows = (json.dumps({"text": text[:3000]}) for text in documents["text"])
        (folder / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def data_of(texts):
    return DataArguments(
        [f"{texts}/train.jsonl"], [f"{texts}/held_out.jsonl"], sequence_length=64, tokenizer_vocab_size=400
    )


def training(output, **options):
    fixed = {"per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    fixed |= {"logging_steps": 10, "save_steps": 10, "dataloader_pin_memory": False, "learning_rate": 3e-3}
    return TrainingArguments(str(output), **(fixed | options))


@pytest.fixture(scope="module")
def teacher(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    pretrain(ModelArguments(model_type="llama", config=SIZES), data_of(texts), training(folder, max_steps=60))
    return folder


@pytest.fixture(scope="module")
def arguments(teacher):
    stages = {"align": {"max_steps": 20}, "distil": {"max_steps": 20, "eval_strategy": "steps", "eval_steps": 10}}
    return UpcycleArguments(str(teacher), keep=0.25, config={"state_size": 8}, **stages)


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
    assert results["kept_attention_layers"] == [2] and results["steps"] == 40 and results["tokens"] == 40 * 4 * 64
    assert json.loads((folder / "results.json").read_text()) == results
    assert (folder / "gap.png").stat().st_size > 1000


def test_the_result_is_an_ordinary_checkpoint_whose_card_names_the_teacher(whole, teacher):
    folder, _ = whole
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.block_types.count("linear_attention") == 3
    card = (folder / "README.md").read_text()
    assert f"| teacher | {teacher.name} |" in card and "perplexity over teachers" in card
    assert (folder / "modeling_longhorn.py").is_file()
    # no state is kept while a stage trains; what it leaves generates from one again
    for saved in (folder, folder / "align", folder / "distil"):
        assert json.loads((saved / "config.json").read_text())["use_cache"] is True, saved


@pytest.mark.parametrize("keep_by", [None, "recall", "kl", "sensitivity", "even"])
def test_layers_are_chosen_as_asked(keep_by):
    """The teacher's third layer alone recalls, its second writes what that one reads; rows of text are recalled."""
    rows = Dataset.from_dict(
        {"input_ids": [prompt.input_ids[0].tolist() for prompt in recall_prompts(None, VOCAB, 40)]}
    )
    wanted = {"sensitivity": [1, 2], "even": [1, 3]}.get(keep_by, [0, 2])
    arguments = UpcycleArguments("teacher", keep=2, keep_by=keep_by, config={"sliding_window": 16})
    assert upcycle.chosen_layers(arguments, recalling_teacher(), None, rows) == wanted


def test_a_killed_run_goes_on_to_the_same_bits(whole, arguments, texts, tmp_path):
    folder, results = whole
    shutil.copytree(folder / "align", tmp_path / "align")
    (tmp_path / "distil").mkdir()
    shutil.copytree(folder / "distil/checkpoint-10", tmp_path / "distil/checkpoint-10")
    again = upcycle_model(arguments, data_of(texts), training(tmp_path))
    assert again == results
    first, second = (load_file(where / "model.safetensors") for where in (folder, tmp_path))
    assert all(torch.equal(first[key], second[key]) for key in first)


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


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_block_state_transformer_goes_through_every_stage(lora_rank, texts, teacher, tmp_path):
    config = {"sliding_window": 16, "ssm_layers": [1, 3], "ssm_state_size": 4}
    stages = {"align": {"max_steps": 10}, "distil": {"max_steps": 4}, "finetune": {"max_steps": 4}}
    arguments = UpcycleArguments(str(teacher), "bst", config=config, lora_rank=lora_rank, **stages)
    results = upcycle_model(arguments, data_of(texts), training(tmp_path))
    assert results["sliding_window"] == 16 and results["layers_with_context_states"] == [1, 3]
    assert results["steps"] == 18 and results["loss_after_align"] != results["loss_before_training"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "bst" and (tmp_path / "modeling_bst.py").is_file()
    old, aligned, new = (load_file(where / "model.safetensors") for where in (teacher, tmp_path / "align", tmp_path))
    assert aligned["model.layers.1.attention.o_proj.weight"][:, 32:].abs().max() > 0
    for theirs, ours in (("self_attn.q_proj", "attention.q_proj"), ("mlp.up_proj", "feed_forward.up_proj")):
        first, then, last = (
            weights[f"model.layers.1.{name}.weight"] for weights, name in ((old, theirs), (aligned, ours), (new, ours))
        )
        assert torch.equal(first, then) and not torch.equal(then, last)
    assert torch.equal(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"]) == (lora_rank is not None)


def test_refusals(teacher, texts, tmp_path):
    with pytest.raises(ValueError, match="keep_by='best'"):
        UpcycleArguments(str(teacher), keep_by="best")
    with pytest.raises(ValueError, match=r"got keep=\[1\]"):
        UpcycleArguments(str(teacher), keep=[1], keep_by="sensitivity")
    with pytest.raises(ValueError, match="student='spade' must be one of 'longhorn', 'bst'"):
        UpcycleArguments(str(teacher), student="spade")
    with pytest.raises(ValueError, match="align has nothing to train"):
        nothing = UpcycleArguments(str(teacher), "bst", config={"ssm_layers": []}, align={"max_steps": 1})
        upcycle_model(nothing, data_of(texts), training(tmp_path / "nothing"))
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reference": "b"}, r"reference='b' must be one of variants=\['a'\]"),
        ({"files": {}}, r"files=\{\} must map"),
        ({"files": ["c"]}, r"files=\['c'\] must map one kind of text or more"),
        ({"variants": {"a": {"intermediate_size": 8}}}, r"'a' has an intermediate_size without teacher_goes_on"),
    ],
)
def test_gaps_that_cannot_be_measured(wrong, message):
    with pytest.raises(ValueError, match=message):
        GapArguments(**{"base": {}, "variants": {"a": {}}, "files": {"b": ["c"]}} | wrong)


def test_gaps_compare_students_with_their_teacher(teacher, texts, tmp_path):
    base = {"teacher": str(teacher), "config": {"state_size": 4}, "sequence_length": 32, "use_cpu": True}
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
