"""Read a text once, and save the model's state after it to a file.

`hf-hybrid-ssm generate --context` goes on from the file. It is small, however long the text, except with full
attention. It belongs to the weights that wrote it.

Examples:
    hf-hybrid-ssm read FOLDER book.txt --context book.safetensors
    hf-hybrid-ssm generate FOLDER "And then" --context book.safetensors
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hf_hybrid_ssm.cli.loading import loaded
from hf_hybrid_ssm.cli.parsing import add_json, add_model, check_model_name, check_writable, parser_of
from hf_hybrid_ssm.cli.progress import progress


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("read", __doc__)
    add_model(parser)
    parser.add_argument("text", metavar="FILE", help="text in UTF-8 to read; - is the input")
    parser.add_argument("--context", type=Path, metavar="FILE", required=True, help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    parser.add_argument("--piece", type=int, default=4096, metavar="N", help="tokens at once (default: %(default)s)")
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.piece < 1:
        parser.error(f"--piece {args.piece} must be at least 1")
    check_model_name(args.model)
    check_writable(args.context)
    if args.context.exists() and not args.overwrite:
        raise FileExistsError(f"{args.context} exists: choose another name, or give --overwrite.")
    text = sys.stdin.read() if args.text == "-" else Path(args.text).read_text(encoding="utf-8")

    import torch
    from transformers import DynamicCache

    from hf_hybrid_ssm.serving import save_context

    tokenizer, model = loaded(parser, args)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{args.model} holds an encoder-decoder, which reads its source at once.")
    tokens = tokenizer(text, return_tensors="pt", return_token_type_ids=False, verbose=False)["input_ids"]
    if tokens.shape[1] < 2:
        raise ValueError(f"{args.text} has {tokens.shape[1]} tokens, and a context is of at least 2.")
    cache, begun = DynamicCache(config=model.config), time.perf_counter()
    with torch.inference_mode():
        # the last token stays unread: it is what the model continues from
        for piece in progress(tokens[:, :-1].to(model.device).split(args.piece, dim=1), "reading"):
            model.get_decoder()(piece, cache=cache, use_cache=True)
    size = save_context(cache, args.context, model, tokens=tokens, overwrite=args.overwrite)
    seconds, count = time.perf_counter() - begun, tokens.shape[1]
    if args.json:
        print(json.dumps({"context": str(args.context), "tokens": count, "bytes": size, "seconds": seconds}))
    else:
        print(f"{args.context}: {count:,} tokens in {size:,} bytes, {seconds:.1f} s")
    return 0


def continued(path: str, tokenizer: Any, model: Any, prompt: str) -> tuple[dict[str, Any], Any]:
    """The inputs of `generate` for a prompt that follows the text of a context, and its cache.

    Raises:
        ValueError: the file is not this model's context, or does not hold the text of one row.
    """
    import torch

    from hf_hybrid_ssm.serving import load_context

    context = load_context(path, model)
    if context.tokens is None or context.tokens.shape[0] != 1:
        raise ValueError(f"{path} does not hold the tokens of one text: hf-hybrid-ssm read writes such a file.")
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].long()
    ids = torch.cat([context.tokens, ids.to(model.device)], dim=1)
    if ids.shape[1] == context.num_tokens:
        raise ValueError(f"{path} ends with a token that was read: give a prompt.")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, context.cache
