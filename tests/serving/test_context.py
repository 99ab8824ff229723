"""Contexts in files: continuing one equals reading the text again, and what does not belong together is refused."""

import io
import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, EncoderDecoderCache, StaticCache

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.planning.measurement import cache_bytes
from hf_hybrid_ssm.serving import context as contexts
from hf_hybrid_ssm.serving import load_context, save_context
from tests.cli.folders import TEXT, save_checkpoint
from tests.models.invariances import TOLERANCE, pad_rows, random_ids, whole
from tests.tiny_models import VARIANTS, config_of, language_model, own_language_model

GROWING = {
    "longhorn + window and full attention": [2],
    "lmu-isa + global attention": [0, 1],
    "spade hyena full": [0, 1],
    "longhorn + full attention": [0],
    "student: windows and a full layer": [1],
    "student: groups": [0, 2],
    "student: first tokens": [2],
}
# one of each family, and the one with transformers' own cache layer
SOME = ["longhorn + window and full attention", "bst block-recurrent", "lmu-isa", "spade s4 window", "student: groups"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "book.safetensors"


@torch.inference_mode()
def read(model, ids, cache=None, **inputs):
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(ids, past_key_values=cache, use_cache=True, **inputs)
    return cache


def saved(cache, path, model, **options) -> int:
    """Without the warning that the file grows, which a test of its own asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "layers .* keep the keys")
        return save_context(cache, path, model, **options)


@torch.inference_mode()
def continued(model, cache, ids, **inputs):
    """Logits of a piece and of single tokens after it."""
    mask = inputs.pop("attention_mask", None)
    pieces = [ids[:, :3], *ids[:, 3:].split(1, dim=1)]
    logits, count = [], 0 if mask is None else mask.shape[1] - ids.shape[1]
    for piece in pieces:
        count += piece.shape[1]
        options = inputs if mask is None else inputs | {"attention_mask": mask[:, :count]}
        logits.append(model(piece, past_key_values=cache, use_cache=True, **options).logits)
    return torch.cat(logits, 1)


# -- the same as reading again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_goes_on_as_if_it_had_been_read_again(variant, path):
    model, following = language_model(variant), random_ids(language_model(variant), 2, 6, seed=1)
    rows = [random_ids(model, 1, length, seed=length) for length in (13, 8)]
    ids, mask = pad_rows(rows, 0, "left")
    saved(read(model, ids, attention_mask=mask), path, model, tokens=ids, attention_mask=mask)
    context = load_context(path, model)
    assert context.num_tokens == 13 == context.past_key_values.get_seq_length()
    assert torch.equal(context.tokens, ids) and torch.equal(context.attention_mask, mask)
    more = torch.cat([context.attention_mask, torch.ones_like(following)], 1)
    logits = continued(model, context.past_key_values, following, attention_mask=more)
    for index, row in enumerate(rows):
        expected = whole(model, torch.cat([row, following[index : index + 1]], 1))[:, -6:]
        torch.testing.assert_close(logits[index : index + 1], expected, **TOLERANCE)


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_in_other_dtypes(variant, dtype, path):
    model = own_language_model(variant).to(dtype)
    ids = random_ids(model, 2, 19)
    cache = read(model, ids[:, :12])
    saved(cache, path, model)
    loaded = load_context(path, model).past_key_values
    for before, after in zip(cache.layers, loaded.layers):
        for name, state in getattr(before, "states", {}).items():
            assert after.states[name].dtype == state.dtype
    torch.testing.assert_close(continued(model, loaded, ids[:, 12:]), continued(model, cache, ids[:, 12:]))


@pytest.mark.parametrize("variant", SOME)
def test_after_packed_documents_the_last_one_goes_on(variant, path):
    model = language_model(variant)
    ids, seq_idx = random_ids(model, 1, 20), torch.tensor([[0] * 5 + [1] * 8])
    saved(read(model, ids[:, :13], seq_idx=seq_idx), path, model)
    logits = continued(model, load_context(path, model).past_key_values, ids[:, 13:])
    torch.testing.assert_close(logits, whole(model, ids[:, 5:])[:, -7:], **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_static_caches(variant, path):
    model = language_model(variant)
    ids, static = random_ids(model, 1, 20), lambda: StaticCache(config=model.config, max_cache_len=24)
    cache = read(model, ids[:, :13], static())
    if variant in GROWING:
        with pytest.raises(ValueError, match=r"cache is static, and layers .* reserve room in it"):
            save_context(cache, path, model)
        saved(read(model, ids[:, :13]), path, model)
        with pytest.raises(ValueError, match=r"cache is static, and layers .* reserve room in it"):
            load_context(path, model, past_key_values=static())
        return
    saved(cache, path, model)
    expected = whole(model, ids)[:, 13:]
    for target in (None, static()):
        loaded = load_context(path, model, past_key_values=target).past_key_values
        assert target is None or loaded is target
        torch.testing.assert_close(continued(model, loaded, ids[:, 13:]), expected, **TOLERANCE)


@pytest.mark.parametrize("variant", SOME)
def test_generating_with_and_without_assistance(variant, path):
    model, options = language_model(variant), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = random_ids(model, 1, 15)
    cache = read(model, ids[:, :11])
    saved(cache, path, model, tokens=ids[:, :12])
    context = load_context(path, model)
    text = torch.cat([context.tokens, ids[:, 12:]], 1)
    expected = model.generate(ids, repetition_penalty=1.3, **options)
    found = model.generate(text, past_key_values=context.past_key_values, repetition_penalty=1.3, **options)
    assert torch.equal(text, ids) and torch.equal(found, expected)
    again = load_context(path, model).past_key_values
    found = model.generate(text, past_key_values=again, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(found, model.generate(ids, **options))
    assert again.get_seq_length() == found.shape[1] - 1  # nothing was read twice


def test_the_recorded_past_ends_where_the_file_begins(path):
    model = language_model("longhorn")
    ids, cache = random_ids(model, 1, 12), DynamicCache(config=model.config)
    cache.activate_past_recording()
    read(model, ids, cache)
    saved(cache, path, model)
    loaded = load_context(path, model).past_key_values
    loaded.activate_past_recording()
    read(model, ids[:, :3], loaded)
    loaded.crop(-3)
    assert loaded.get_seq_length() == 12
    with pytest.raises(ValueError, match="goes 1 tokens beyond the recorded past"):
        loaded.crop(-1)


# -- its size ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_size_is_that_of_the_states_or_is_told(variant, path):
    model = language_model(variant)
    caches = [read(model, random_ids(model, 1, length)) for length in (20, 90)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        size = save_context(caches[1], path, model)
    assert size == path.stat().st_size
    messages = [str(warning.message) for warning in told if "keep the keys" in str(warning.message)]
    assert len(messages) == (variant in GROWING) == (cache_bytes(caches[0]) < cache_bytes(caches[1]))
    for message in messages:
        assert message.startswith(f"layers {GROWING[variant]} keep") and f" {size:,} bytes" in message


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def book(path):
    model = language_model("spade s4 window")
    save_context(read(model, random_ids(model, 1, 9)), path, model)
    return path


def changed(**fields):
    return AutoModelForCausalLM.from_config(config_of("spade s4 window", **fields)).eval()


def other_weights():
    model = own_language_model("spade s4 window")
    with torch.no_grad():
        next(model.get_decoder().layers[1].parameters()).view(-1)[0] += 1e-3
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: language_model("longhorn"), "read by a model of the family 'spade', this one is 'longhorn'"),
        (lambda: changed(sliding_window=6), "was read with sliding_window=7, this model has sliding_window=6"),
        (lambda: own_language_model("spade s4 window").bfloat16(), "read in float32, this model computes in bfloat16"),
        (other_weights, "was read by other weights"),
        (lambda: language_model("encoder-decoder"), "a 'spade_seq2seq' model reads its source at once"),
    ],
    ids=["family", "configuration", "dtype", "weights", "encoder-decoder"],
)
def test_another_model(model, words, book):
    with pytest.raises(ValueError, match=words):
        load_context(book, model())


def test_the_same_model_saved_and_loaded_again_is_the_same(book, tmp_path):
    model = language_model("spade s4 window")
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded.config.pad_token_id = 7  # has no effect on a state
    assert load_context(book, loaded).num_tokens == 9
    assert load_context(book, loaded.get_decoder()).num_tokens == 9


def test_damaged_files(book, tmp_path):
    model, content = language_model("spade s4 window"), book.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")

    def refused(data, words):
        book.write_bytes(data)
        with pytest.raises(ValueError, match=words) as error:
            load_context(book, model)
        assert str(book) in str(error.value)

    for length in (0, 7, 100, header, header + 40, len(content) - 1):
        refused(content[:length], "is not a complete safetensors file")
    for place in (header, (header + len(content)) // 2, len(content) - 1):
        refused(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :], "is damaged: its content")
    version = f'"version":"{contexts.VERSION}"'.encode()
    refused(content.replace(version, b'"version":"9"'), "is a context of version 9")
    book.write_bytes(content)
    save_file(load_file(book), book)
    refused(book.read_bytes(), "is not a context")
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors is not a file"):
        load_context(tmp_path / "none.safetensors", model)


def rewritten(path, change):
    """The file as somebody would write it who computes the digest too."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["context"])
    tensors = load_file(path)
    header, tensors = change(header, tensors) or (header, tensors)
    if isinstance(header, dict) and "content" in header:
        header.pop("content")
        header |= {"content": contexts._digest(header, tensors)}
    metadata = {"format": contexts.FORMAT, "version": str(contexts.VERSION), "context": json.dumps(header)}
    save_file(tensors, path, metadata)


def of_header(**fields):
    return lambda header, tensors: header.update(fields)


def of_state(change, name="layers.0."):
    def changed(_, tensors):
        key = next(key for key in sorted(tensors) if key.startswith(name) and tensors[key].is_floating_point())
        tensors[key] = change(tensors[key]).contiguous()

    return changed


FORGED = {
    "more tokens": (of_header(num_tokens=10**9), "must have shape"),
    "no tokens": (of_header(num_tokens=0), "num_tokens=0 must be at least 1"),
    "tokens as text": (of_header(num_tokens="9"), "num_tokens must be int, got '9'"),
    "tokens as a flag": (of_header(num_tokens=True), "num_tokens must be int, got True"),
    "a list of weights": (of_header(weights=[1]), r"weights must be str, got \[1\]"),
    "another computation": (of_header(computation={"a\nb": "c\n"}), "was read with a b=c , this model has a b=None"),
    "a computation in words": (of_header(computation="usual"), "computation must be dict"),
    "no weights": (of_header(weights=None), "weights must be str"),
    "a configuration in words": (of_header(configuration="large"), "configuration must be dict"),
    "a number as family": (of_header(family=3), "family must be str"),
    "another field": (of_header(more=1), "its fields are"),
    "a list": (lambda header, tensors: ([], tensors), "its fields are .* got list"),
    "a lacking field": (lambda header, _: header.pop("dtype") and None, "its fields are"),
    "nothing": (lambda header, _: (header, {}), "lacks layers.0"),
    "text alone": (lambda header, tensors: (header, {"tokens": tensors["tokens"]}), "lacks layers.0"),
    "a lacking state": (lambda _, tensors: tensors.pop(next(iter(sorted(tensors)))) is None, "lacks|holds"),
    "another state": (lambda _, tensors: tensors.update({"layers.9.x": torch.zeros(1)}), r"holds layers\.9\.x"),
    "whole numbers": (of_state(lambda state: state.to(torch.int8)), "must have shape .* got .* torch.int8"),
    "another kind of number": (
        of_state(lambda state: state.to(torch.float8_e4m3fn)),
        "must have shape .* got .* torch.float8_e4m3fn|numbers, got .* torch.float8_e4m3fn",
    ),
    "NaN": (of_state(lambda state: state * torch.nan), "holds NaN"),
    "another shape": (of_state(lambda state: state[..., :-1]), "must have shape"),
    "another rank": (of_state(lambda state: state[..., None]), "must have shape"),
    "another batch": (of_state(lambda state: torch.cat([state, state])), "must have shape"),
    "unknown tokens": (lambda _, tensors: tensors["tokens"].fill_(10**6) is None, "must lie in the vocabulary"),
    "fewer tokens": (
        lambda header, tensors: (header, tensors | {"tokens": tensors["tokens"][:, :3].contiguous()}),
        "tokens must have",
    ),
}


@pytest.mark.parametrize("variant", ["longhorn + full attention", "lmu-isa", "spade s4 window"])
@pytest.mark.parametrize("forged", FORGED)
def test_what_is_no_state_of_the_model_is_refused_in_a_line(forged, variant, path):
    """Also where the digest is right, which anybody can compute."""
    model = language_model(variant)
    ids = random_ids(model, 1, 9)
    saved(read(model, ids), path, model, tokens=ids)
    rewritten(path, lambda *_: None)
    load_context(path, model)
    change, words = FORGED[forged]
    rewritten(path, change)
    with pytest.raises(ValueError, match=words) as error:
        load_context(path, model)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("variant", GROWING)
def test_keys_are_those_of_the_text(variant, path):
    """Not of more tokens than it has, where a layer keeps them of all: neither all of its tensors nor one."""
    model, length = language_model(variant), 9
    cache = read(model, random_ids(model, 1, length))

    def longer(one=None):
        def change(_, tensors):
            for name in own if one is None else [one]:
                axis = tensors[name].shape.index(length)
                more = tensors[name].narrow(axis, 0, 1)
                tensors[name] = torch.cat([tensors[name], more], axis)

        return change

    saved(cache, path, model)
    own = [
        name
        for name, tensor in load_file(path).items()
        if length in tensor.shape[1:] and any(name.startswith(f"layers.{layer}.") for layer in GROWING[variant])
    ]
    assert {name.rsplit(".", 1)[1] for name in own} >= {"keys", "values"}
    for one in (None, next(name for name in own if name.endswith("keys"))):
        saved(cache, path, model, overwrite=True)
        rewritten(path, longer(one))
        with pytest.raises(ValueError, match=rf"{one or own[0].partition('.')[0]}.* must have shape"):
            load_context(path, model)


def test_no_bit_of_the_header_can_change(book):
    """Every letter of it, one at a time: `num_tokens` of 40 that becomes 10 would read 30 tokens again."""
    model, content = language_model("spade s4 window"), book.read_bytes()
    with safe_open(book, framework="pt") as file:
        written = json.dumps(file.metadata()["context"]).encode()[1:-1]
    start = content.index(written)
    for place in range(start, start + len(written)):
        book.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"context|header|damaged|complete"):
            load_context(book, model)


def test_what_cannot_be_saved(path, book):
    model = language_model("longhorn")
    ids, content = random_ids(model, 2, 9), book.read_bytes()
    cache = read(model, ids)
    with pytest.raises(FileExistsError, match=r"book\.safetensors exists"):
        save_context(cache, book, model)
    assert book.read_bytes() == content
    book.unlink()
    with pytest.raises(ValueError, match="cache is empty"):
        save_context(DynamicCache(config=model.config), path, model)
    with pytest.raises(TypeError, match="cache must be a transformers Cache of one stack"):
        save_context(EncoderDecoderCache(DynamicCache(), DynamicCache()), path, model)
    with pytest.raises(TypeError, match="cache must be a transformers Cache"):
        save_context(((ids,),), path, model)
    with pytest.raises(ValueError, match="filled by a model of the family 'longhorn'"):
        save_context(cache, path, language_model("bst block-recurrent"))
    with pytest.raises(ValueError, match=r"tokens must have shape .* \(2, at least 9\), got \(2, 8\)"):
        save_context(cache, path, model, tokens=ids[:, :8])
    with pytest.raises(ValueError, match=r"attention_mask must have shape .* got \(1, 9\)"):
        save_context(cache, path, model, tokens=ids, attention_mask=torch.ones(1, 9))
    assert list(path.parent.iterdir()) == []
    save_context(cache, path, model)
    with pytest.raises(ValueError, match="cache holds 9 tokens: give an empty cache"):
        load_context(path, model, past_key_values=cache)


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("contexts") / "longhorn")


def told(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("prompt", [" eight", ""])
def test_a_text_is_read_once_and_continued(prompt, folder, path, tmp_path, capsys, monkeypatch):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    assert (
        main(["read", str(folder), str(tmp_path / "text.txt"), "--context", str(path), "--piece", "7", "--json"]) == 0
    )
    found = told(capsys)
    assert found["tokens"] == ids.shape[1] and found["bytes"] == path.stat().st_size
    ids = torch.cat([ids, tokenizer(prompt, return_tensors="pt")["input_ids"].long()], 1)
    expected = model.generate(ids, max_new_tokens=6)[0, ids.shape[1] :]
    for _ in range(2):  # which does not change the file
        command = ["generate", str(folder), "--context", str(path), "--prompt", prompt, "--max-new-tokens", "6"]
        assert main([*command, "--json"]) == 0
        assert told(capsys)["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert main(["read", str(folder), "-", "--context", str(path)]) == 1
    assert "exists: choose another name, or give --overwrite" in capsys.readouterr().err
    assert main(["read", str(folder), "-", "--context", str(path), "--overwrite"]) == 0
    assert f" {found['bytes']:,} bytes" in capsys.readouterr().out


def test_commands_refuse(folder, path, tmp_path, capsys, monkeypatch):
    def refused(words, *arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO("a"))
        assert main([*map(str, arguments)]) == 1
        assert words in capsys.readouterr().err

    refused("has 1 tokens, and a context is of at least 2", "read", folder, "-", "--context", path)
    refused("there is no folder", "read", folder, "-", "--context", tmp_path / "no" / "book.safetensors")
    other = save_checkpoint(tmp_path / "other", "encoder-decoder")
    refused("reads its source at once", "read", other, "-", "--context", path)
    refused("is not a context", "generate", folder, "--context", folder / "model.safetensors", "--prompt", "a")
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = random_ids(model, 1, 9)
    save_context(read(model, ids), path, model)
    refused("does not hold the tokens of one text", "generate", folder, "--context", path, "--prompt", "a")
    save_context(read(model, ids), path, model, tokens=ids, overwrite=True)
    refused("ends with a token that was read: give a prompt", "generate", folder, "--context", path, "--prompt", "")
    with pytest.raises(SystemExit):
        main(["read", str(folder), "-", "--context", str(path), "--piece", "0"])
