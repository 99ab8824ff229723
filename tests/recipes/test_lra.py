"""Long Range Arena: ListOps means what it says, archives in the official layout are read, every task trains."""

import json
import random

import numpy as np
import pytest
import torch
from _lib.lra_data import END, LISTOPS, TASKS, UNKNOWN, collate, listops_ids, load_task
from compare_lra import CompareLraArguments, compare_lra
from datasets import Dataset
from listops import draw, trees, write
from lra import LraArguments, arena, build
from PIL import Image
from safetensors.torch import load_file

from tests.recipes import small

SPADE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPADE |= {"sliding_window": 9, "chunk_size": 8, "classifier_hidden_size": 8, "ssm_state_size": 4}
BST = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
BST |= {"ssm_layers": [1], "sliding_window": 8, "num_context_states": 2, "ssm_state_size": 4}


def value(text):
    """What a bracketed expression comes to, by a reader of its own."""
    stack = []
    for token in text.replace("(", " ").replace(")", " ").split():
        if token != "]":
            stack.append(int(token) if token.isdigit() else token)
            continue
        numbers = []
        while isinstance(stack[-1], int):
            numbers.append(stack.pop())
        numbers.sort()
        middle = len(numbers) // 2
        median = numbers[middle] if len(numbers) % 2 else (numbers[middle - 1] + numbers[middle]) // 2
        meaning = {"[MIN": numbers[0], "[MAX": numbers[-1], "[MED": median, "[SM": sum(numbers) % 10}
        stack.append(meaning[stack.pop()])
    assert len(stack) == 1
    return stack[0]


def counted(text):
    """1 for a value, 2 for an operator with its end."""
    return sum(2 if token.startswith("[") else token.isdigit() for token in text.split())


def test_listops_trees():
    found = trees(60, seed=1, min_length=10, max_length=60)
    assert found == trees(60, seed=1, min_length=10, max_length=60) != trees(60, seed=2, min_length=10, max_length=60)
    assert len({text for text, _ in found}) == 60
    for text, result in found:
        assert value(text) == result and 10 < counted(text) < 60
        assert text.count("(") == text.count(")") == len(text.split()) - text.count("(") - text.count(")") - 1
    assert {token for text, _ in found for token in text.split()} == {"(", ")", "]", "[MIN", "[MAX", "[MED", "[SM"} | {
        str(digit) for digit in range(10)
    }


def test_listops_distribution():
    choose = random.Random(0)
    drawn = [draw(choose, max_length=100_000, max_depth=2, max_args=10) for _ in range(8000)]
    operations = [text for text, _, _ in drawn if "[" in text]
    assert abs(len(operations) / 8000 - 0.25) < 0.02
    counts = np.bincount([counted(text) - 2 for text in operations], minlength=11)[2:]  # at depth 2 all are values
    assert len(counts) == 9 and counts.min() > 150 and counts.max() < 300
    assert draw(random.Random(0), 1, max_depth=1) == ("", 0, 1)


def test_listops_tokens():
    text = "( ( ( [MAX 2 ) 9 ) ] )"
    assert value(text) == 9
    assert listops_ids(text, 100) == [LISTOPS["[MAX"], LISTOPS["2"], LISTOPS["9"], LISTOPS["X"], END]
    assert listops_ids(text, 3) == [LISTOPS["[MAX"], LISTOPS["2"], END]
    assert listops_ids("[FIRST", 9) == [UNKNOWN, END] and max(LISTOPS.values()) == 17


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """All six tasks, tiny, as the arena's archive unpacks."""
    folder = tmp_path_factory.mktemp("arena")
    inside = folder / "lra_release/lra_release"
    write(inside, (24, 4, 4), min_length=3, max_length=30)
    (inside / "tsv_data").mkdir()
    for split in ("train", "eval", "test"):
        rows = [f"{n % 2}.0\t{n}\t{n + 1}\tb'text {n}'\tb'another text {n}'\n" for n in range(16)]
        (inside / f"tsv_data/new_aan_pairs.{split}.tsv").write_text("".join(rows), encoding="utf-8")
    for name, size in (("pathfinder32", 32), ("pathfinder128", 128)):
        level = inside / name / "curv_contour_length_14"
        (level / "metadata").mkdir(parents=True)
        for part in range(2):
            (level / f"imgs/{part}").mkdir(parents=True)
            lines = []
            for n in range(10):
                image = np.full((size, size), 10 * part + n, dtype=np.uint8)
                image[0, 1] = 200
                Image.fromarray(image).save(level / f"imgs/{part}/sample_{n}.png")
                lines.append(f"imgs/{part} sample_{n}.png {n} {n % 2} 0 1.5\n")
            (level / f"metadata/{part}.npy").write_text("".join(lines), encoding="utf-8")
        (level / "imgs/1/sample_9.png").write_bytes(b"")  # the archive has an empty one
    for split in ("train", "test"):
        rows = [json.dumps({"text": f"{'good' if n % 2 else 'bad'} film", "label": n % 2}) for n in range(16)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
        images = {"pixels": [[n] * 1024 for n in range(20)], "label": [n % 10 for n in range(20)]}
        Dataset.from_dict(images).to_parquet(folder / f"{split}.parquet")
    return folder


def test_readers(archive):
    listops = load_task("listops", archive, 10)
    assert [len(listops[split]) for split in ("train", "validation", "test")] == [24, 4, 4]
    assert max(map(len, listops["train"]["input_ids"])) == 10
    text = load_task("text", archive)
    assert bytes(text["train"][1]["input_ids"]) == b"good film" and text["test"][:] == text["validation"][:]
    first, second = load_task("retrieval", archive, 9)["test"][3]["input_ids"]
    assert bytes(first) == b"b'text 3'" and bytes(second) == b"b'another"
    assert load_task("retrieval", archive)["train"]["label"][:3] == [0, 1, 0]
    image = load_task("image", archive)
    assert [len(image[split]) for split in ("train", "validation", "test")] == [18, 2, 20]
    for name, length in (("pathfinder", 1024), ("pathx", 16384)):
        splits = load_task(name, archive)
        assert [len(splits[split]) for split in ("train", "validation", "test")] == [15, 2, 2]
        rows = [row for split in splits.values() for row in split]
        assert {len(row["input_ids"]) for row in rows} == {length} and rows[0]["input_ids"][1] == 200
        assert sorted(row["input_ids"][0] for row in rows) == list(range(19))
        assert all(row["label"] == row["input_ids"][0] % 2 for row in rows)


def test_quotes_are_text(tmp_path):
    """As in the arena's own pipeline: a text that starts with a quote swallows no row after it."""
    for split in ("train", "eval", "test"):
        rows = ["1.0\t1\t2\t\"b'first\tsecond\n", '0.0\t3\t4\tthird\t"fourth"\n', "1.0\t5\t6\tx\ty\n"]
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text("".join(rows), encoding="utf-8")
    found = [list(map(bytes, pair)) for pair in load_task("retrieval", tmp_path)["test"]["input_ids"]]
    assert found == [[b"\"b'first", b"second"], [b"third", b'"fourth"'], [b"x", b"y"]]


def test_collating_pairs():
    rows = [{"input_ids": [[5, 6, 7], [8]], "label": 1}, {"input_ids": [[9], [10, 11]], "label": 0}]
    batch = collate(rows, paired=True)
    assert batch["input_ids"].tolist() == [[[5, 6, 7], [8, 0, 0]], [[9, 0, 0], [10, 11, 0]]]
    assert batch["attention_mask"].tolist() == [[[1, 1, 1], [1, 0, 0]], [[1, 0, 0], [1, 1, 0]]]
    batch = collate(rows, paired=False, separator=1)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1, 8], [9, 1, 10, 11, 0]]
    assert torch.equal(batch["labels"], torch.tensor([1, 0]))


def training(folder, **options):
    fixed = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    return small.training(folder, **fixed | options)


@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("task", [task for task in TASKS if task != "pathx"])
def test_spade_on_every_task(archive, tmp_path, task, kind):
    preset = f"spade-lra-{task}-{kind}"
    results = arena(LraArguments(task, str(archive), "spade", preset, SPADE), training(tmp_path))
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert 0 <= results["test"]["accuracy"] <= 100 and results["steps"] == 2


@pytest.mark.parametrize("task, bidirectional", [("listops", True), ("retrieval", False), ("image", True)])
def test_bst(archive, tmp_path, task, bidirectional):
    config = BST | {"bidirectional": bidirectional}
    results = arena(LraArguments(task, str(archive), "bst", config=config), training(tmp_path))
    assert results["rows"]["train"] == len(load_task(task, archive)["train"])


def test_learns_what_can_be_learnt(archive, tmp_path):
    arguments = LraArguments("text", str(archive), "spade", "spade-lra-text-window", SPADE | {"dropout": 0.0})
    results = arena(arguments, training(tmp_path, max_steps=40, learning_rate=1e-2))
    assert results["test"]["accuracy"] == 100 and results["test"]["commonest_class"] == 50


def test_the_best_on_validation_is_scored(archive, tmp_path):
    """A rate that ruins the weights in the end: what is reported are those of the best evaluation."""
    arguments = LraArguments("text", str(archive), "spade", "spade-lra-text-window", SPADE | {"dropout": 0.0})
    options = {
        "max_steps": 60,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_total_limit": 1,
        "save_strategy": "no",
    }
    results = arena(arguments, training(tmp_path, learning_rate=1e-2, **options))
    history = json.loads((tmp_path / "history.json").read_text())
    found = {entry["step"]: entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry}
    on_the_way = {step: value for step, value in found.items() if step % 10 == 0}
    assert results["scored_step"] == max(on_the_way, key=on_the_way.get) < results["steps"] == 60
    assert results["validation"]["accuracy"] == max(on_the_way.values())
    saved = load_file(tmp_path / f"checkpoint-{results['scored_step']}/model.safetensors")
    scored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[key], scored[key]) for key in saved)


def test_resumes_bit_for_bit(archive, tmp_path):
    given = ("listops", str(archive), "spade", "spade-lra-listops-chunk", SPADE | {"dropout": 0.2})

    def run(folder, resume):
        return arena(LraArguments(*given, resume=resume), training(folder, max_steps=8, save_steps=4))

    assert small.killed_and_resumed(run, tmp_path)["steps"] == 8


def test_presets_have_the_size_of_the_paper(archive):
    for task in TASKS:
        arguments = LraArguments(task, str(archive), "spade", f"spade-lra-{task}-chunk")
        assert 100_000 < build(arguments).num_parameters() < 2_000_000


def test_bad_input(archive, tmp_path):
    for task in TASKS:
        with pytest.raises(FileNotFoundError, match=str(tmp_path)):
            load_task(task, tmp_path)
    with pytest.raises(ValueError, match="num_labels=3"):
        build(LraArguments("text", "x", "spade", config=SPADE | {"num_labels": 3}))
    with pytest.raises(ValueError, match="vocab_size=100"):
        build(LraArguments("text", "x", "spade", config=SPADE | {"vocab_size": 100}))
    with pytest.raises(ValueError, match="paired_input"):
        build(LraArguments("text", "x", "spade", config=SPADE | {"paired_input": True}))
    with pytest.raises(ValueError, match="1024 pixels, 999 are needed"):
        load_task("image", archive, 999)
    (tmp_path / "listops").mkdir()
    for split in ("train", "val", "test"):
        (tmp_path / f"listops/basic_{split}.tsv").write_text("Source\tTarget\n( [MAX 2 ) ]\t11\n")
    with pytest.raises(ValueError, match="labels run from 11 to 11"):
        load_task("listops", tmp_path)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "good"}\n')
    with pytest.raises(ValueError, match=r"columns \['label'\]"):
        load_task("text", tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/something").write_text("")
    with pytest.raises(FileExistsError, match="overwrite"):
        arena(LraArguments("text", str(archive), "spade", config=SPADE), training(tmp_path / "out"))


def test_models_side_by_side(tmp_path):
    write(tmp_path / "trees", rows=(40, 8, 8), min_length=5, max_length=30)
    given = {"base": {"model_type": "spade", "data_folder": str(tmp_path / "trees"), "max_length": 32, "max_steps": 2}}
    given["base"] |= small.QUIET | {"per_device_train_batch_size": 4}
    given["base"]["config"] = SPADE
    given["tasks"] = {"listops": {"learning_rate": 1e-3}}
    given["variants"] = {"SPADE": {}, "window attention": {"config": {"ssm_layers": []}}}
    given["output_dir"] = str(tmp_path / "runs")
    given["seeds"] = [3, 4]
    found = compare_lra(CompareLraArguments(**given, results=str(tmp_path / "lra.json")))["tasks"]["listops"]
    assert found["window attention"][0]["parameters"] < found["SPADE"][0]["parameters"]
    for runs in found.values():
        assert [run["seed"] for run in runs] == [3, 4] and runs[0]["train_loss"] != runs[1]["train_loss"]
        assert all(run["steps"] == 2 and 0 <= run["test"]["accuracy"] <= 100 for run in runs)
    assert json.loads((tmp_path / "lra.json").read_text())["tasks"]["listops"] == found

    made = tmp_path / "runs" / "listops-SPADE-3" / "run.json"
    made.write_text(json.dumps(found["SPADE"][0] | {"seconds": -1.0}))  # what is there is not run again
    assert compare_lra(CompareLraArguments(**given))["tasks"]["listops"]["SPADE"][0]["seconds"] == -1.0
    with pytest.raises(ValueError, match="listpos"):  # before anything is trained
        compare_lra(CompareLraArguments(**given | {"tasks": given["tasks"] | {"listpos": {}}, "overwrite": True}))
    assert made.exists()
