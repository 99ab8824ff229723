"""A cache of prefixes with a folder: what one process has read, another one does not read again."""

import json
import os
import struct
import subprocess
import sys
import warnings

import pytest
import torch
from transformers import DynamicCache

from hf_hybrid_ssm.serving import PrefixCache, load_context, prefix_folder, save_context
from tests.models.invariances import random_ids
from tests.serving.test_prefix_cache import SOME, answered, check_same, in_float64
from tests.tiny_models import VARIANTS, language_model

FOLDER_VARIABLE = "HF_HYBRID_SSM_PREFIX_CACHE_FOLDER"


def files(folder):
    return sorted(folder.glob(f"prefix-{'?' * 32}-*-{'?' * 32}.safetensors"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_conversation_goes_on_after_a_restart(variant, tmp_path):
    model = in_float64(variant)
    text = random_ids(model, 1, 19)
    answer, read = check_same(model, text, PrefixCache(every=8, folder=tmp_path / "states"))
    assert read == 19 and len(files(tmp_path / "states")) == 2  # after the prompt and after the answer
    again = PrefixCache(every=8, folder=tmp_path / "states")
    text = torch.cat([answer, random_ids(model, 1, 4, seed=1)], 1)
    given = {"attention_mask": torch.ones_like(text)}
    assert check_same(model, text, again, **given)[1] == 5
    assert check_same(model, text, again, **given)[1] == 1  # by now it is in memory
    assert check_same(model, answer[:, :19].int(), PrefixCache(folder=tmp_path / "states"))[1] == 1  # regenerated


@pytest.mark.parametrize("variant", SOME)
def test_files_are_contexts(variant, tmp_path):
    model = in_float64(variant)
    output = answered(model, random_ids(model, 1, 19), PrefixCache(folder=tmp_path)).sequences
    *_, last = files(tmp_path)
    context = load_context(last, model)
    assert torch.equal(context.tokens, output[:, :-1]) and context.num_tokens == output.shape[1] - 1


def test_other_weights_do_not_take_them(tmp_path):
    model, other = in_float64("longhorn"), in_float64("longhorn")
    ids = random_ids(model, 1, 15)
    check_same(model, ids, PrefixCache(folder=tmp_path))
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    cache = PrefixCache(folder=tmp_path)
    assert check_same(other, ids, cache)[1] == 15
    assert check_same(model, ids, cache)[1] == 1
    assert check_same(in_float64("lmu-isa"), ids, cache)[1] == 15


def file_of(kind: str, shape: list[int], size: int) -> bytes:
    """A safetensors file of tokens of any kind."""
    header = json.dumps({"tokens": {"dtype": kind, "shape": shape, "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def changed(content: bytes) -> bytes:
    place = 8 + int.from_bytes(content[:8], "little") + 16  # in a state; the ids come last
    return content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :]


DAMAGES = {
    "cut": lambda content: content[:-100],
    "changed": changed,
    "empty": lambda content: b"",
    "noise": lambda content: bytes(range(256)) * 9,
    "a header alone": lambda content: content[: 8 + int.from_bytes(content[:8], "little")],
    "no tokens": lambda content: file_of("I32", [1, 0], 0),
    "another name": lambda content: file_of("I32", [1, 9], 36).replace(b"tokens", b"tokenz"),
    "a row of tokens": lambda content: file_of("I32", [9], 36),
    "rows of tokens": lambda content: file_of("I32", [2, 9], 72),
    "a number": lambda content: file_of("I32", [], 4),
}
SIZES = {"F4": 8, "F8_E4M3": 16, "BOOL": 16, "U8": 16, "BF16": 32, "F32": 64, "I64": 128, "C64": 128}  # of 16 tokens
DAMAGES |= {f"tokens of {kind}": lambda _, kind=kind: file_of(kind, [1, 16], SIZES[kind]) for kind in SIZES}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_once_and_another_serves(damage, tmp_path):
    model = in_float64("longhorn")
    ids = random_ids(model, 1, 15)
    answer, _ = check_same(model, ids, PrefixCache(folder=tmp_path))
    _, last = files(tmp_path)
    last.write_bytes(DAMAGES[damage](last.read_bytes()))
    cache = PrefixCache(folder=tmp_path)
    with pytest.warns(UserWarning, match=f"{last.name} does not serve") as said:
        assert check_same(model, answer, cache)[1] == answer.shape[1] - 14
    assert len(said) == 1 and "\n" not in str(said[0].message)
    cache.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answered(model, answer, cache)


FOREIGN = {
    "a longer text than its states": lambda model, ids: (ids[:, :12], ids, {}),
    "padding": lambda model, ids: (ids, ids, {"attention_mask": (torch.arange(ids.shape[1]) > 1).long()[None]}),
    "documents": lambda model, ids: (ids, ids, {"seq_idx": (torch.arange(ids.shape[1]) // 5).int()[None]}),
}


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.filterwarnings("ignore:layers .* keep the keys")
def test_a_context_of_something_else_does_not_serve(kind, variant, tmp_path):
    """Whole, and of this model: but not of all the tokens that it names, read as a text alone."""
    model = in_float64(variant)
    ids = random_ids(model, 1, 15)
    answer, _ = check_same(model, ids, PrefixCache(folder=tmp_path))
    _, last = files(tmp_path)
    length, *_ = (context := load_context(last, model)).tokens.shape[1:]
    read, text, options = FOREIGN[kind](model, context.tokens)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(read, past_key_values=cache, use_cache=True, **options)
    given = {name: value for name, value in options.items() if name == "attention_mask"}
    save_context(cache, last, model, tokens=text, overwrite=True, **given)
    with pytest.warns(UserWarning, match=f"{last.name} does not serve: it is no text of {length} tokens"):
        assert check_same(model, answer, PrefixCache(folder=tmp_path))[1] == answer.shape[1] - 14


@pytest.mark.filterwarnings("ignore:.* was not written")
def test_links_and_folders_are_passed_over(tmp_path):
    model = in_float64("longhorn")
    ids = random_ids(model, 1, 15)
    check_same(model, ids, PrefixCache(folder=tmp_path / "states"))
    first, last = files(tmp_path / "states")
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    last.unlink()
    last.mkdir()
    assert check_same(model, ids, PrefixCache(folder=tmp_path / "states"))[1] == 15
    assert first.is_symlink() and last.is_dir()


def test_the_least_recently_used_are_deleted_and_nothing_of_the_users(tmp_path):
    model = in_float64("longhorn")
    own = [
        tmp_path / name
        for name in ("notes.txt", "context.safetensors", "prefix-list.txt", "prefix-tuning.safetensors")
    ]
    for path in own:
        path.write_text("x" * 100_000)
    one, two, three = (random_ids(model, 1, 9, seed=seed) for seed in range(3))
    answered(model, one, PrefixCache(folder=tmp_path))
    size = sum(path.stat().st_size for path in files(tmp_path))
    cache = PrefixCache(folder=tmp_path, max_folder_bytes=2 * size + 200)
    for ids, read in ((two, 9), (one, 1), (three, 9), (one, 1), (two, 9)):
        cache.clear()
        assert check_same(model, ids, cache)[1] == read
        assert len(files(tmp_path)) == 4  # two of each text
    PrefixCache(folder=tmp_path).clear()
    assert len(files(tmp_path)) == 4 and all(path.stat().st_size == 100_000 for path in own)
    answered(model, three, PrefixCache(folder=tmp_path, max_folder_bytes=size // 4))
    assert files(tmp_path) == []


def test_a_file_that_served_is_used(tmp_path):
    """Also where it is not written again: an answer that a longer text goes on from."""
    model = in_float64("longhorn")
    answer, _ = check_same(model, random_ids(model, 1, 9), PrefixCache(folder=tmp_path))
    prompt, served = files(tmp_path)
    for path in (prompt, served):
        os.utime(path, (1000, 1000))
    more = torch.cat([answer, random_ids(model, 1, 4, seed=1)], 1)
    assert check_same(model, more, PrefixCache(folder=tmp_path), attention_mask=torch.ones_like(more))[1] == 5
    assert prompt.stat().st_mtime == 1000 < served.stat().st_mtime


FAILING = {
    "a file may not be touched": (
        prefix_folder.os,
        "utime",
        PermissionError(1, "not permitted"),
        "was not written",
        0,
        1,
    ),
    "the disk is full": (prefix_folder, "write_context", OSError(28, "No space left"), "was not written", 1, 15),
    "a file may not be read": (prefix_folder, "load_context", PermissionError(13, "denied"), "does not serve", 0, 15),
}
"""What raises what, what is said, which text is read, and how many of its tokens."""


@pytest.mark.parametrize("failing", FAILING)
def test_what_fails_costs_the_file_alone(failing, tmp_path, monkeypatch):
    place, name, error, words, seed, read = FAILING[failing]
    model = in_float64("longhorn")
    check_same(model, random_ids(model, 1, 15), PrefixCache(folder=tmp_path))

    def fails(*_):
        raise error

    monkeypatch.setattr(place, name, fails)
    with pytest.warns(UserWarning, match=f"{words}: .*{error.strerror}"):
        assert check_same(model, random_ids(model, 1, 15, seed=seed), PrefixCache(folder=tmp_path))[1] == read


def test_a_file_that_goes_while_it_is_wanted(tmp_path, monkeypatch):
    """Another process may delete it; the text is read."""
    model = in_float64("longhorn")
    ids = random_ids(model, 1, 15)
    check_same(model, ids, PrefixCache(folder=tmp_path))
    kept = prefix_folder.load_context

    def gone(path, model):
        path.unlink()
        return kept(path, model)

    monkeypatch.setattr(prefix_folder, "load_context", gone)
    assert check_same(model, ids, PrefixCache(folder=tmp_path))[1] == 15


def test_states_that_are_not_numbers_cost_the_file_alone(tmp_path):
    model = in_float64("longhorn")
    with torch.no_grad():
        model.model.layers[0].norm.weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match="was not written: .*NaN"):
        output = answered(model, random_ids(model, 1, 15), PrefixCache(folder=tmp_path))
    assert output.sequences.shape[1] > 15 and files(tmp_path) == []


def test_a_folder_is_made_for_the_user_alone(tmp_path):
    PrefixCache(folder=tmp_path / "new" / "states")
    assert (tmp_path / "new" / "states").stat().st_mode & 0o777 == 0o700


def test_bad_arguments(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"folder=.*file' is a file: name a folder"):
        PrefixCache(folder=tmp_path / "file")


SERVER = """
import sys, torch
from hf_hybrid_ssm.serving.prefix_cache import of_process
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.generate(torch.arange(3, 20)[None], attention_mask=torch.ones(1, 17), max_new_tokens=3, eos_token_id=None)
print(of_process().tokens_read)
"""


def test_a_server_that_starts_again(tmp_path):
    language_model("longhorn").save_pretrained(tmp_path / "model")
    environment = os.environ | {FOLDER_VARIABLE: str(tmp_path / "states")}
    command = [sys.executable, "-c", f"import hf_hybrid_ssm\n{SERVER}", str(tmp_path / "model")]
    read = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1]
        for _ in range(2)
    ]
    assert read == ["17", "1"]
