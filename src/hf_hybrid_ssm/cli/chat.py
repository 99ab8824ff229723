"""Talk with a checkpoint that has a chat template, line by line.

Each line is a message, and the answer is printed while it is generated. What was said before is not read again: its
state is kept (a GiB at most; `HF_HYBRID_SSM_PREFIX_CACHE` sets another number of bytes, 0 for none). With --compile
tokens are written faster, but each turn reads all that was said. The line !clear begins a new conversation; !exit ends
the command, as does the end of the input. In a terminal Ctrl-C ends an answer. The input may also be a file, whose
lines are answered in turn.

Examples:
    hf-hybrid-ssm chat FOLDER
    hf-hybrid-ssm chat FOLDER --system "Answer in one sentence." --temperature 0.7
    hf-hybrid-ssm chat FOLDER --json < questions.txt
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from hf_hybrid_ssm.cli.generation import (
    add_generation,
    answered,
    inputs_of_conversation,
    options_of,
    say_why_empty,
    utf8_text,
)
from hf_hybrid_ssm.cli.loading import loaded
from hf_hybrid_ssm.cli.parsing import add_json, add_model, check_model_name, parser_of

ASKED = "> "
EXIT, CLEAR = "!exit", "!clear"  # as `transformers chat` calls them


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("chat", __doc__)
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message that every conversation begins with")
    add_generation(parser, max_new_tokens=512)
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    check_model_name(args.model)
    from transformers import set_seed

    tokenizer, model = loaded(parser, args)
    if model.config.is_encoder_decoder or tokenizer.chat_template is None:
        kind = "an encoder-decoder" if model.config.is_encoder_decoder else "no chat template"
        raise ValueError(f"{args.model} holds {kind}: `hf-hybrid-ssm generate FOLDER TEXT` continues a text.")
    if args.seed is not None:
        set_seed(args.seed)
    options = options_of(args) | ({} if args.compile else prefix_cache_of(model))
    converse(model, tokenizer, options, args.system, args.json, args.compile)
    return 0


def converse(
    model: Any, tokenizer: Any, options: dict[str, Any], system: str | None, as_json: bool, compiles: bool = False
) -> None:
    """Answer the lines of the input, each after all that was said before it."""
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    for line in lines():
        if line == EXIT:
            return
        if line == CLEAR:
            messages = list(beginning)
            continue
        asked = [*messages, {"role": "user", "content": line}]
        inputs = inputs_of_conversation(tokenizer, asked).to(model.device)
        try:
            answer = answered(model, tokenizer, inputs, options, streams=not as_json, compiles=compiles)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print("\ninterrupted: this message and its answer are forgotten.", file=sys.stderr)
            continue
        if as_json:
            print(json.dumps({"prompt": line} | answer.as_json()), flush=True)
        say_why_empty(answer, "Ask in other words, or begin again by !clear.")
        if answer.finish_reason == "length":
            print(f"the answer ends after {answer.new_tokens} tokens: --max-new-tokens allows more.", file=sys.stderr)
        messages = [*asked, {"role": "assistant", "content": answer.text}]


def lines() -> Iterator[str]:
    """The lines of the input that are not empty, without spaces around them; a terminal is asked for each."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lets `input` edit a line
        print(f"{EXIT} ends, {CLEAR} begins a new conversation.", file=sys.stderr)
    while True:
        try:
            line = utf8_text(lambda: input(ASKED) if is_terminal else input()).strip()
        except EOFError:
            return
        if line:
            yield line


def prefix_cache_of(model: Any) -> dict[str, Any]:
    """The argument of `generate` that keeps states of earlier turns: none for models of transformers' own, else what
    the variables of the environment ask for, and without them a cache of this conversation's own."""
    from hf_hybrid_ssm.models.base import HybridPreTrainedModel
    from hf_hybrid_ssm.serving.prefix_cache import FOLDER_VARIABLE, VARIABLE, PrefixCache, of_process

    if not isinstance(model, HybridPreTrainedModel):
        return {}
    cache = of_process() if {VARIABLE, FOLDER_VARIABLE} & os.environ.keys() else PrefixCache()
    return {} if cache is None else {"prefix_cache": cache}
