"""Continue a text with a checkpoint, or answer it, word by word as it is generated.

A folder with a chat template answers: the prompt is put into the template as a user's message, unless --raw is given.
Greedy, unless the folder's generation_config.json says otherwise; with a sampling option, tokens are drawn. Without a
template the prompt gets the special tokens that the tokenizer itself adds, and no others. No code of the folder is
executed; its chat template is rendered in the sandbox of transformers.

Examples:
    hf-hybrid-ssm generate FOLDER "It was a dark and" --max-new-tokens 100
    hf-hybrid-ssm generate FOLDER "What is the capital of France?"
    hf-hybrid-ssm generate FOLDER --temperature 0.8 --top-p 0.95 < prompt.txt
    hf-hybrid-ssm generate FOLDER "And then" --context book.safetensors
"""

import argparse
import json
import sys
from typing import Any

from hf_hybrid_ssm.cli.generation import (
    add_generation,
    answered,
    inputs_of,
    inputs_of_conversation,
    options_of,
    say_why_empty,
    utf8_text,
)
from hf_hybrid_ssm.cli.loading import loaded
from hf_hybrid_ssm.cli.parsing import add_json, add_model, check_model_name, parser_of
from hf_hybrid_ssm.cli.read import continued


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_intermixed_args(arguments)
    if args.text is not None and args.prompt is not None:
        parser.error("TEXT and --prompt are the same: give one of them")
    if args.compile and args.context is not None:
        parser.error("--compile has a cache of its own, and --context brings one: give one of them")
    check_model_name(args.model)
    prompt = text_of(args.prompt if args.text is None else args.text)
    from transformers import set_seed

    tokenizer, model = loaded(parser, args)
    if args.seed is not None:
        set_seed(args.seed)
    options = options_of(args)
    limit = most_tokens(model.config)
    if limit is not None:
        options["max_new_tokens"] = min(args.max_new_tokens, limit)
    is_chat = tokenizer.chat_template is not None and not args.raw and args.context is None
    if args.context is not None:
        inputs, options["cache"] = continued(args.context, tokenizer, model, prompt)
    elif is_chat:
        inputs = inputs_of_conversation(tokenizer, [{"role": "user", "content": prompt}]).to(model.device)
    else:
        inputs = inputs_of(tokenizer, prompt).to(model.device)
    answer = answered(model, tokenizer, inputs, options, streams=not args.json, compiles=args.compile)
    if args.json:
        print(json.dumps({"prompt": prompt} | answer.as_json()))
    if is_chat or tokenizer.chat_template is None or args.context is not None:
        advice = "Give other words, or draw tokens by --sample."
    else:
        advice = "Leave out --raw, and the prompt is put into the chat template of the folder."
    say_why_empty(answer, advice)
    if answer.finish_reason == "length" and limit is not None and limit < args.max_new_tokens:
        print(f"the text ends after {limit} tokens: the decoder has no more positions.", file=sys.stderr)
    return 0


def most_tokens(config: Any) -> int | None:
    """The learned positions of a decoder, of which each token takes one; None where nothing ends."""
    is_learned = getattr(config, "decoder_position_embedding_type", None) == "learned"
    return config.max_target_positions if is_learned else None


def text_of(prompt: str | None) -> str:
    """The prompt, by default the input without its last line break.

    Raises:
        ValueError: it is not UTF-8.
    """
    return utf8_text(lambda: sys.stdin.read().removesuffix("\n") if prompt is None else prompt)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("generate", __doc__)
    add_model(parser)
    parser.add_argument("text", metavar="TEXT", nargs="?", help="prompt (default: it is read from the input)")
    parser.add_argument("--prompt", metavar="TEXT", help="the same as TEXT")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument(
        "--context", metavar="FILE", help="file that `hf-hybrid-ssm read` wrote; the prompt follows its text as it is"
    )
    add_generation(parser, max_new_tokens=100)
    add_json(parser)
    return parser
