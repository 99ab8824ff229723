"""`benchmarks/long_context.py` on a tiny teacher: every model and form."""

import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks import long_context, long_context_torch
from benchmarks.long_context_models import STUDENTS, TEACHER, make_folders, student_of
from benchmarks.speed_tables import long_context as table
from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from tests.upcycle.teacher_files import write_gguf

ROOT = Path(__file__).parents[1]
LAYERS, LENGTH = 8, 1100
REQUEST = {"steps": 1, "rounds": 1, "seconds": 1.0}
OPTIONS = ["--steps", "1", "--rounds", "1", "--threads", "1"]
LLAMA_PYTHON = os.environ.get(long_context.LLAMA_PYTHON)


@cache
def teacher():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, **sizes)).eval()


@cache
def model_of(name):
    return teacher() if name == TEACHER else student_of(teacher(), name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("teacher")
    teacher().save_pretrained(place)
    AutoTokenizer.from_pretrained(ROOT / "checkpoints/longhorn-books").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_context, "WORK", tmp_path_factory.mktemp("work"))
        yield


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory, work):
    """Arguments of a whole run with one student in its own processes, and the file that it wrote."""
    output = tmp_path_factory.mktemp("measured") / "figures.json"
    arguments = [str(folder), "--models", "bst-256", "--forms", "bfloat16", "--lengths", "24", "16", *OPTIONS]
    arguments += ["--kinds", "write"]  # one process: importing torch takes longer than all that it measures
    arguments += ["--output", str(output)]
    long_context.main(arguments)
    return arguments, output


def held(layer):
    return layer.states if is_recurrent_state_layer(layer) else {"keys": layer.keys, "values": layer.values}


@pytest.mark.parametrize("name", [TEACHER, *STUDENTS])
def test_a_filled_cache_is_as_large_as_one_that_was_read(name):
    model = model_of(name)
    read = DynamicCache(config=model.config)
    long_context_torch.forward(model, long_context_torch.tokens(model, LENGTH), read)
    filled = long_context_torch.filled_cache(model, LENGTH)
    for ours, theirs in zip(filled.layers, read.layers, strict=True):
        shapes = [{key: (x.shape, x.dtype) for key, x in held(layer).items()} for layer in (ours, theirs)]
        assert shapes[0] == shapes[1]
    later = 128 if name == "bst-256" else 256 if name == "bst-512" else 0  # half a block
    assert filled.get_seq_length() == read.get_seq_length() + later == LENGTH + later
    assert long_context_torch.cache_bytes(filled) == long_context_torch.cache_bytes(read)
    seen = [layer.states["seen"].item() for layer in filled.layers if "seen" in held(layer)]
    assert set(seen) <= {LENGTH + later}
    assert long_context_torch.write(model, LENGTH, REQUEST)["milliseconds_per_token"] > 0
    assert filled.get_seq_length() == LENGTH + later


def test_only_caches_that_keep_all_tokens_grow():
    sizes = {
        name: [long_context_torch.write(model_of(name), length, REQUEST)["cache_bytes"] for length in (1100, 2200)]
        for name in (TEACHER, *STUDENTS)
    }
    config = teacher().config
    of_a_token = 2 * 4 * config.num_key_value_heads * config.head_dim  # keys and values in float32
    grown = {name: (after - before) / of_a_token / 1100 for name, (before, after) in sizes.items()}
    of_layers = {TEACHER: LAYERS, "bst-256": 0, "bst-512": 0, "longhorn": 6, "windows": 6, "windows-alone": 0}
    assert grown == of_layers | {"groups": min(9, LAYERS) / config.num_key_value_heads}


@pytest.mark.parametrize("form", long_context_torch.FORMS)
def test_every_model_is_timed_in_every_form(form, folder, tmp_path_factory):
    dtype, bits = long_context_torch.FORMS[form]
    place = tmp_path_factory.getbasetemp() / "models"
    place.mkdir(exist_ok=True)
    names = [TEACHER, *STUDENTS]
    folders = make_folders(str(folder), names, [dtype], place)
    for name in names:
        model = long_context_torch.load(str(folders[name, dtype]), form)
        assert model.dtype == getattr(torch, dtype)
        kinds = {type(module).__name__ for module in model.modules()}
        assert ("LowBitLinear" in kinds) == (bits is not None)
        found = long_context_torch.read(model, 20, REQUEST)
        assert found["tokens_per_second"] == pytest.approx(20 / found["seconds"], rel=0.2)
        assert found["peak_bytes"] > 2**20
        assert len(long_context_torch.write(model, 20, REQUEST)["rounds"]) == 1


def test_a_run_gives_every_cell_and_says_what_was_measured(measured):
    arguments, output = measured
    figures = json.loads(output.read_text(encoding="utf-8"))
    cells = figures["cells"]["bst-256"]["bfloat16"]
    assert {kind: list(found) for kind, found in cells.items()} == {"write": ["16", "24"]}
    assert all(cell["commit"] == figures["commit"] for cell in cells["write"].values())
    assert figures["teacher"]["name"] == arguments[0].rpartition("/")[2]
    assert figures["command"] == (
        f"python benchmarks/long_context.py {figures['teacher']['name']} --threads 1 --steps 1 --rounds 1"
    )
    assert "| BST, windows of 256, bfloat16 |" in table(figures)


@pytest.mark.skipif(LLAMA_PYTHON is None, reason=f"${long_context.LLAMA_PYTHON} names no Python with llama-cpp-python")
def test_llama_cpp_reads_the_file_in_three_forms(tmp_path, work):
    file = write_gguf(tmp_path / "tiny.gguf", quantized=True)
    arguments = [str(file), "--models", "llama.cpp", "--lengths", "256", "1100", "--llama-python", LLAMA_PYTHON]
    arguments += ["--output", str(tmp_path / "figures.json"), *OPTIONS]
    long_context.main(arguments)
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    found = figures["cells"]["llama.cpp"]
    assert list(found) == ["as given", "Q8_0", "F16"] and not figures["skipped"]
    for kinds in found.values():
        assert [list(cells) for cells in kinds.values()] == [["256", "1100"]] * 2
        written, read = ([cell["cache_bytes"] for cell in kinds[kind].values()] for kind in ("write", "read"))
        assert written == read  # as large when it is filled as when it was read
    assert "llama.cpp, Q4_1" in table(figures)
