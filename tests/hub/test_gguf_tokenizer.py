"""The tokenizer of a GGUF file does what the file says, with every transformers, or is refused by the key's name."""

import importlib.util

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from hf_hybrid_ssm.hub.gguf_header import GgufHeader
from hf_hybrid_ssm.hub.gguf_tokenizer import tokenizer_of

BUILDS_ALL = importlib.util.find_spec("transformers.integrations.gguf") is not None
of_newer_transformers = pytest.mark.skipif(not BUILDS_ALL, reason="transformers 5.16 builds no such tokenizer")
SPECIAL = ["<end>", "<begin>", "<pad>", "<think>"]
CONTROL, NORMAL, BYTE, USER_DEFINED = 3, 1, 6, 4
MERGES = [("1", "2"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("'", "S"), ("a", "b")]


def header(tmp_path, **keys):
    fields = {"general.architecture": "llama"}
    fields |= {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}
    return GgufHeader(tmp_path / "a.gguf", fields, {})


def byte_level(tmp_path, **keys):
    """With merges of two digits, two line ends, two spaces, 'S, ab; and a whole "xyz" that no merge makes."""
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), *map("".join, MERGES), "xyz"]
    kinds = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 4)
    own = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": list(map(" ".join, MERGES)),
    }
    own |= {"bos_token_id": 1, "eos_token_id": 0, "padding_token_id": 2}
    return header(tmp_path, **own | keys)


def sentencepiece(tmp_path, **keys):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "ab"]
    kinds = [2, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 6
    scores = [0.0] * 261 + [-3.0, -1.0, -2.0, -2.0, -1.5][: len(tokens) - 261]
    own = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores[: len(tokens)]}
    own |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return header(tmp_path, **own | keys)


def pieces(tokenizer, text, **options):
    return tokenizer.convert_ids_to_tokens(tokenizer(text, **options)["input_ids"])


GPT2 = {"a\n\n12": ["a", "Ċ", "Ċ", "12"], "a  1": ["a", "Ġ", "Ġ", "1"], "'S": ["'", "S"], "xyz": ["x", "y", "z"]}
DIGITS = {"a\n\n12": ["a", "ĊĊ", "1", "2"], "a  1": ["a", "ĠĠ", "1"], "'S": ["'", "S"], "xyz": ["x", "y", "z"]}
LLAMA3 = {"a\n\n12": ["a", "ĊĊ", "12"], "'S": ["'S"], "xyz": ["xyz"], "ab": ["ab"]}
QWEN2 = {"a\n\n12": ["a", "ĊĊ", "1", "2"], "'S": ["'S"]}
SPLITS = [
    (None, GPT2),
    ("gpt-2", GPT2),
    ("smollm", DIGITS),
    ("refact", DIGITS),
    pytest.param("llama-bpe", LLAMA3, marks=of_newer_transformers),
    pytest.param("qwen2", QWEN2, marks=of_newer_transformers),
]


@pytest.mark.parametrize(("split", "texts"), SPLITS)
def test_texts_are_split_as_the_file_says(split, texts, tmp_path):
    """As llama.cpp splits them: by GPT-2's expression, which keeps a space for what follows; digits one by one; by
    Llama 3's, whose pieces are tokens whatever the merges say."""
    tokenizer = tokenizer_of(byte_level(tmp_path, pre=split, add_bos_token=False))
    assert {text: pieces(tokenizer, text) for text in texts} == texts


@pytest.mark.parametrize("begins", [None, True, False])
@pytest.mark.parametrize("ends", [None, True, False])
def test_begin_and_end(begins, ends, tmp_path):
    tokenizer = tokenizer_of(byte_level(tmp_path, add_bos_token=begins, add_eos_token=ends))
    assert pieces(tokenizer, "ab") == ["<begin>"] * bool(begins) + ["ab"] + ["<end>"] * bool(ends)
    assert pieces(tokenizer, "ab", add_special_tokens=False) == ["ab"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0, 2)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert pieces(again, "ab") == pieces(tokenizer, "ab") and again.special_tokens_map == tokenizer.special_tokens_map


@of_newer_transformers
def test_texts_of_a_llama_3_begin_with_its_begin_token_unless_the_file_says_otherwise(tmp_path):
    for said, wanted in ((None, ["<begin>", "ab"]), (True, ["<begin>", "ab"]), (False, ["ab"])):
        assert pieces(tokenizer_of(byte_level(tmp_path, pre="llama-bpe", add_bos_token=said)), "ab") == wanted


def test_control_tokens_and_those_of_the_user_are_whole(tmp_path):
    tokenizer = tokenizer_of(byte_level(tmp_path))
    assert pieces(tokenizer, "a<end>b<think>") == ["a", "<end>", "b", "<think>"]
    assert tokenizer.decode(tokenizer("a<end>b<think>")["input_ids"], skip_special_tokens=True) == "ab<think>"


def test_a_token_that_the_file_does_not_name_is_none(tmp_path):
    tokenizer = tokenizer_of(byte_level(tmp_path, bos_token_id=None, eos_token_id=None, padding_token_id=None))
    assert tokenizer.bos_token is tokenizer.eos_token is tokenizer.pad_token is tokenizer.unk_token is None


@of_newer_transformers
def test_sentencepiece_begins_with_a_begin_token_and_a_space(tmp_path):
    assert pieces(tokenizer_of(sentencepiece(tmp_path)), "ab") == ["<s>", "▁ab"]
    assert pieces(tokenizer_of(sentencepiece(tmp_path, add_bos_token=False)), "ab") == ["▁ab"]


REFUSED = {
    "another kind": (byte_level, {"model": "bert"}, r"no tokenizer that is read \(tokenizer\.ggml\.model='bert'\)"),
    "none": (byte_level, {"tokens": None}, r"no tokenizer that is read"),
    "another split": (byte_level, {"pre": "of-tomorrow"}, r"tokenizer\.ggml\.pre='of-tomorrow' is not known"),
    "a separator": (byte_level, {"add_sep_token": True}, r"tokenizer\.ggml\.add_sep_token is not read"),
    "a key": (byte_level, {"of_tomorrow": 1}, r"tokenizer\.ggml\.of_tomorrow is not read"),
    "a character map": (byte_level, {"precompiled_charsmap": [1]}, r"precompiled_charsmap is not read"),
    "a token beyond": (byte_level, {"unknown_token_id": 5000}, r"a special token beyond its 266 tokens"),
    "two tokens alike": (byte_level, {"tokens": ["<end>"] * 266}, r"has no tokenizer that can be built: "),
    "no space": (
        sentencepiece,
        {"add_space_prefix": False},
        r"does not do what tokenizer\.ggml\.add_space_prefix says",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_built_as_the_file_says_is_refused_by_name(kind, tmp_path):
    make, keys, message = REFUSED[kind]
    if make is sentencepiece and not BUILDS_ALL:
        message = "does not build its tokenizer as the file says: pip install -U transformers"
    with pytest.raises(ValueError, match=message) as error:
        tokenizer_of(make(tmp_path, **keys))
    assert "a.gguf" in str(error.value) and "\n" not in str(error.value)


def test_keys_that_change_no_text_are_no_obstacle(tmp_path):
    """Files hold ids of tokens that no text begins or ends with."""
    keys = {"add_sep_token": False, "add_space_prefix": False, "fim_pre_token_id": 3, "token_type_count": 1}
    assert pieces(tokenizer_of(byte_level(tmp_path, **keys)), "ab") == ["ab"]
