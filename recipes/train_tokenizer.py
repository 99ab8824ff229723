"""Train the byte-level BPE tokenizer of the checkpoints.

    python recipes/train_tokenizer.py FOLDER FILE [FILE ...] --vocab-size 4096

One tokenizer serves all objectives: `<|endoftext|>` begins and ends documents, `<|pad|>` and `<|mask|>` are for masked
language modelling, and `<extra_id_0>`, `<extra_id_1>`, ... for span corruption.
"""

import argparse
import sys
from pathlib import Path

from _lib.checks import check_texts
from _lib.documents import documents_of_files, train_tokenizer
from _lib.entry import guarded

from hf_hybrid_ssm.cli.settings import as_flags

SENTINELS = 32  # spans of three tokens at a density of 15 %: enough for inputs of 600 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where the tokenizer goes")
    parser.add_argument("files", nargs="+", metavar="FILE", help="txt (one document per file), jsonl or parquet")
    parser.add_argument("--vocab-size", type=int, default=4096, help="special tokens included (default: 4096)")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is in the folder")
    options = parser.parse_args(as_flags(sys.argv[1:]))
    if (Path(options.folder) / "tokenizer.json").exists() and not options.overwrite:
        raise FileExistsError(f"{options.folder} holds a tokenizer: name another folder, or give --overwrite.")
    documents = documents_of_files(options.files)
    check_texts(documents, [options.text_column], "--text-column")
    special = {
        "pad_token": "<|pad|>",
        "mask_token": "<|mask|>",
        "additional_special_tokens": [f"<extra_id_{number}>" for number in range(SENTINELS)],
    }
    added = 2 + SENTINELS
    texts = (document[options.text_column] for document in documents)
    tokenizer = train_tokenizer(texts, options.vocab_size - added)
    tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(options.folder)
    print(f"{options.folder}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    guarded("train_tokenizer.py", main)
