"""Does a folder's tokenizer belong to its model, and make no more of a text than memory holds?"""

import base64
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hf_hybrid_ssm.hub.one_line import in_one_line
from hf_hybrid_ssm.hub.reading import read_json

MOST_GROWTH = 256  # letters for each letter of a text; the normalizer of T5 makes at most 36
MOST_PADDING = 1 << 20  # tokens
BYTES_OF_LETTER = 4  # a byte-level step writes a letter for each byte
STEPS = ("normalizer", "pre_tokenizer", "decoder")


def check_tokenizer(folder: Path, config: Any) -> None:
    """The tokenizer can be loaded, its steps multiply no text, and its tokens are those of the model's vocabulary; a
    folder without tokenizer.json passes.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    check_steps(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        ids = [*tokenizer.get_vocab().values(), *tokenizer("a")["input_ids"]]
        tokens = max(len(tokenizer), *(number + 1 for number in ids))
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ValueError(f"{file} holds no tokenizer: {in_one_line(error)}") from error
    if tokens > config.vocab_size:
        raise ValueError(
            f"{file} has {tokens} tokens, but the model's vocab_size is {config.vocab_size}: it belongs to another "
            "model."
        )


def check_steps(file: Path) -> None:
    """The steps of a tokenizer.json multiply no text.

    Raises:
        ValueError: one does, or cannot be read.
    """
    saved = read_json(file)
    for step in STEPS:
        try:
            growth = _growth(saved.get(step))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{file} holds no tokenizer: its {step} cannot be read.") from error
        if growth > MOST_GROWTH:
            raise ValueError(
                f"{file}: its {step} can make more than {MOST_GROWTH} letters of each letter of a text, which no "
                "tokenizer needs."
            )
    padding = saved.get("padding") or {}
    strategy = padding.get("strategy") if isinstance(padding, dict) else None
    fixed = strategy.get("Fixed") if isinstance(strategy, dict) else None
    for size in (fixed, padding.get("pad_to_multiple_of") if isinstance(padding, dict) else None):
        if isinstance(size, int) and size > MOST_PADDING:
            raise ValueError(f"{file} pads each text to {size:,} tokens; at most {MOST_PADDING:,} are made.")


def _growth(step: Any) -> float:
    """A bound of how many letters a step of the tokenizer makes of one; infinite once it is beyond use."""
    if step is None:
        return 1
    parts = step.get("normalizers") or step.get("pretokenizers") or step.get("decoders")
    if parts is not None:
        growth = 1.0
        for part in parts:
            growth = min(growth * _growth(part), float("inf"))
        return growth
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), len(step.get("content"))
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1, content / len(plain)) if plain else 1 + content  # a regular expression may match nothing
    if kind == "Prepend":
        return 1 + len(step.get("prepend"))
    if kind == "Precompiled":  # a trie, after its size, and then what it puts in place, divided by zeros
        table = base64.b64decode(step.get("precompiled_charsmap"))
        start = 4 + int.from_bytes(table[:4], "little")
        return max(1, *map(len, table[start:].split(b"\0")), 1)
    if kind == "ByteLevel":
        return BYTES_OF_LETTER
    if kind == "BertNormalizer":  # spaces on both sides of a Chinese letter
        return 3
    return 1
