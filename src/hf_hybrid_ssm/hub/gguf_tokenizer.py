"""The tokenizer of a GGUF file, built by transformers and held against what the file says.

llama.cpp defines what a key means, and what holds where it is absent: how text is split before merges
(`tokenizer.ggml.pre`), whether a begin or end token is added, whether a text begins with a space.
"""

import json
from collections.abc import Collection
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_hybrid_ssm.hub.gguf_config import INSTEAD
from hf_hybrid_ssm.hub.gguf_header import GgufHeader
from hf_hybrid_ssm.hub.one_line import in_one_line

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
READ = {
    "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges",
}  # fmt: skip
"""Key → what transformers' builder calls it."""
SPECIAL = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
WITHOUT_EFFECT = ("token_type_count",)
OFF = ("add_sep_token", "remove_extra_whitespaces")
"""Keys that are read where they are False."""
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are whole before any text is split
LIKE_GPT2 = (None, "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4")
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Split as GPT-2 splits, after each digit has become a piece of its own."""
LIKE_LLAMA3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
"""A whole piece that is a token is one, whatever the merges say; and texts begin with the begin token."""


def tokenizer_of(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF file describes, with its chat template.

    Raises:
        ValueError: the file has none, or one that this transformers does not build as llama.cpp reads it. Names the
            key.
    """
    where, fields = str(header.path), dict(_keys_of(header))
    kind, split = fields.get("model"), fields.get("pre")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE) or "tokens" not in fields:
        raise ValueError(f"{where!r} has no tokenizer that is read (tokenizer.ggml.model={kind!r}): {INSTEAD}.")
    _check_keys(where, fields)
    is_bytes = kind == BYTE_LEVEL
    known, build = _of_transformers(where, is_bytes)
    if is_bytes and split not in {*LIKE_GPT2, *SINGLE_DIGITS, *known}:
        raise ValueError(
            f"{where!r}: tokenizer.ggml.pre={split!r} is not known to transformers {transformers.__version__}, which "
            f"would split texts in another way: {INSTEAD}, or a newer transformers."
        )
    try:
        backend, _ = build(header.architecture, {name: fields[key] for key, name in READ.items() if key in fields})
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ValueError(f"{where!r} has no tokenizer that can be built: {in_one_line(error)}") from error
    backend = _without_others(backend, len(fields["tokens"]))
    if is_bytes and split in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if is_bytes and split in LIKE_LLAMA3:
        backend.model.ignore_merges = True
    defaults = (not is_bytes or split in LIKE_LLAMA3, False, not is_bytes)
    begins, ends, has_space = (fields.get(name, default) for name, default in zip(FLAGS, defaults))
    special = {name: fields["tokens"][fields[key]] for name, key in SPECIAL.items() if key in fields}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **dict.fromkeys(SPECIAL) | special,
        add_bos_token=begins,
        add_eos_token=ends,
        chat_template=header.fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
    _check(where, tokenizer, fields, begins, ends, None if is_bytes else has_space)
    return tokenizer


def _keys_of(header: GgufHeader) -> Any:
    prefix = "tokenizer.ggml."
    return ((key.removeprefix(prefix), value) for key, value in header.fields.items() if key.startswith(prefix))


def _check_keys(where: str, fields: dict[str, Any]) -> None:
    known = {*READ, *SPECIAL.values(), *FLAGS, *WITHOUT_EFFECT}
    for key, value in sorted(fields.items()):
        if key in known or key.endswith("_token_id") or (key in OFF and value is False):
            continue
        raise ValueError(f"{where!r}: tokenizer.ggml.{key} is not read, and may change what a text is: {INSTEAD}.")
    if any(not 0 <= fields[key] < len(fields["tokens"]) for key in SPECIAL.values() if key in fields):
        raise ValueError(f"{where!r} names a special token beyond its {len(fields['tokens']):,} tokens.")


def _of_transformers(where: str, is_bytes: bool) -> tuple[Collection[str], Any]:
    """The ways to split texts that transformers knows, and its builder."""
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:  # transformers 5.16, one of whose builders loses nothing
        if not is_bytes:
            raise ValueError(
                f"{where!r}: transformers {transformers.__version__} does not build its tokenizer as the file says: "
                "pip install -U transformers."
            ) from error
        return (), _byte_level
    return GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer


def _without_others(backend: Tokenizer, count: int) -> Tokenizer:
    """Without the tokens that a builder adds to those of the file, as transformers' GPT-2 does with its own end."""
    if backend.get_vocab_size() == count:
        return backend
    saved = json.loads(backend.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < count]
    return Tokenizer.from_str(json.dumps(saved))


def _byte_level(_: str, described: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    from transformers.integrations.ggml import GGUFGPTConverter

    backend = GGUFGPTConverter(described).converted()
    kinds = list(zip(described["tokens"], described.get("token_type", ())))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])
    return backend, {}


def _check(
    where: str,
    tokenizer: PreTrainedTokenizerBase,
    fields: dict[str, Any],
    begins: bool,
    ends: bool,
    has_space: bool | None,
) -> None:
    """What was built has the file's tokens and does what its keys say."""
    tokens, vocabulary = fields["tokens"], tokenizer.get_vocab()
    moved = next((token for index, token in enumerate(tokens) if vocabulary.get(token, index) != index), None)
    if moved is not None or len(tokenizer) != len(tokens):
        told = f"{len(tokenizer):,} tokens of {len(tokens):,}" if moved is None else f"{moved!r} elsewhere"
        raise ValueError(
            f"{where!r}: transformers {transformers.__version__} builds its tokenizer with {told}: {INSTEAD}."
        )
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    wanted = [tokenizer.bos_token_id] * begins + plain + [tokenizer.eos_token_id] * ends
    found = {
        "add_bos_token and add_eos_token": tokenizer("a")["input_ids"] == wanted,
        "add_space_prefix": has_space is None or has_space == (tokenizer.convert_ids_to_tokens(plain)[0][0] == "▁"),
        **{key: getattr(tokenizer, f"{name}_id") == fields.get(key) for name, key in SPECIAL.items()},
    }
    if wrong := [name for name, holds in found.items() if not holds]:
        raise ValueError(
            f"{where!r}: the tokenizer that transformers {transformers.__version__} builds does not do what "
            f"tokenizer.ggml.{wrong[0]} says: {INSTEAD}."
        )
