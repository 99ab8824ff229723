"""Teachers on disk: a folder with its tokenizer, and the same Llama as a GGUF file, written by the package `gguf`."""

import os
import shutil
from pathlib import Path
from typing import Any

from _lib.documents import train_tokenizer

from tests.gguf_files import write_model
from tests.upcycle.test_upcycle import teacher_of

TEXT = "one two three four five six seven eight nine ten"
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


def tokenizer_of_tests():
    """290 tokens, with a chat template."""
    tokenizer = train_tokenizer([TEXT], 290)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def teacher_and_tokenizer(name: str = "llama", **fields):
    """A random teacher with as many tokens as the tokenizer has."""
    tokenizer = tokenizer_of_tests()
    end = tokenizer.eos_token_id
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    return teacher_of(name, **tokens | fields), tokenizer


def save_teacher(folder: Path, name: str = "llama", **fields) -> Path:
    """The folder of a teacher with its tokenizer."""
    teacher, tokenizer = teacher_and_tokenizer(name, **fields)
    teacher.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_gguf(path: Path, quantized: bool = False, **more: Any) -> Path:
    """The same Llama as `save_teacher` writes; for the arguments see `write_model`."""
    return write_model(path, *teacher_and_tokenizer(), quantized=quantized, **more)


def in_cache(folder: Path, cache: Path, name: str) -> Path:
    """The same files as the Hub's cache has them, links to those of their contents; returns their folder."""
    place, commit = cache / f"models--{name.replace('/', '--')}", "0123456789" * 4
    blobs, snapshot = place / "blobs", place / "snapshots" / commit
    for part in (blobs, snapshot, place / "refs"):
        part.mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        shutil.copy(path, blobs / str(number))
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot
