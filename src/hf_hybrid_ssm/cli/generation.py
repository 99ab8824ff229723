"""What the commands that write text share: options of sampling, the tokens of a prompt or a conversation, answers."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SAMPLING = ("temperature", "top_p", "top_k")
LEAST_ROOM = 2048  # tokens, of compiled decoding


@dataclass(frozen=True)
class Answer:
    """What a model wrote.

    Attributes:
        text: without special tokens.
        new_tokens: how many tokens were generated, special ones included.
        seconds: of reading the prompt and generating.
        finish_reason: "stop" if the last token is one that ends a text, "length" if nothing but the limit ended it.
    """

    text: str
    new_tokens: int
    seconds: float
    finish_reason: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def add_generation(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """How many tokens are generated, and how each is chosen."""
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=max_new_tokens,
        metavar="N",
        help="new tokens at most (default: %(default)s)",
    )
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="temperature to draw with; below 1, likelier tokens are drawn more often",
    )
    parser.add_argument("--top-p", type=share, metavar="P", help="draw among the likeliest tokens of total share P")
    parser.add_argument("--top-k", type=positive, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step that writes a token: a minute or two the first time, seconds later (on a CPU)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the draws, for the same text each time")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `generate` that `add_generation` asks for; an option of sampling samples."""
    sampling = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    draws = {"do_sample": True} if args.sample or sampling else {}
    return {"max_new_tokens": args.max_new_tokens} | draws | sampling


def compiled_options(model: Any, tokens: int) -> dict[str, Any]:
    """The arguments of `generate` that compile its step, for texts of up to so many tokens; a line on the error output
    says that it compiles.

    Raises:
        ValueError: the model is not a decoder on a CPU.
    """
    import logging

    from hf_hybrid_ssm import kept_programs
    from hf_hybrid_ssm.compiled import compiled_decoding

    if model.config.is_encoder_decoder or model.device.type != "cpu":
        raise ValueError("--compile is for decoders on a CPU: leave it out.")
    if not kept_programs.logger.handlers:
        kept_programs.logger.propagate = False  # or a line may appear twice
        kept_programs.logger.addHandler(logging.StreamHandler(sys.stderr))
        kept_programs.logger.setLevel(logging.INFO)
    room = max(LEAST_ROOM, 1 << (tokens - 1).bit_length())  # one program for texts of many lengths
    return {"cache_implementation": "static", "max_cache_len": room, "compile_config": compiled_decoding()}


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must lie above 0 and at most at 1")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def utf8_text(read: Callable[[], str]) -> str:
    """The text that `read` returns, as UTF-8 also where the locale does not read its bytes as letters.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return read().encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"the prompt is not UTF-8 text: byte {byte:#04x} at position {error.start}.") from None


def inputs_of(tokenizer: Any, prompt: str) -> Any:
    """The prompt's tokens; of an empty prompt, the token that texts begin with.

    Raises:
        ValueError: the prompt is empty, and the tokenizer has no token that begins or ends texts.
    """
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:
        begin = tokenizer.eos_token if tokenizer.bos_token is None else tokenizer.bos_token
        if begin is None:
            raise ValueError("the prompt is empty, and the tokenizer has no token that begins or ends texts.")
        inputs = tokenizer(begin, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
    return inputs


def inputs_of_conversation(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Any:
    """The tokens of messages in the tokenizer's chat template, up to where the answer begins.

    Raises:
        ValueError: the template cannot be rendered, or refuses such messages.
    """
    from jinja2 import TemplateError

    options = {"return_tensors": "pt", "return_dict": True, "tokenizer_kwargs": {"return_token_type_ids": False}}
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **options)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template of the tokenizer cannot be used: {error}") from error


def answered(
    model: Any, tokenizer: Any, inputs: Mapping[str, Any], options: Mapping[str, Any], streams: bool, compiles: bool
) -> Answer:
    """Generate from the inputs (1, L), and print the text while it is generated if `streams`."""
    import torch
    from transformers import TextStreamer

    shown = {"streamer": TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)} if streams else {}
    if compiles:
        options = dict(options) | compiled_options(model, inputs["input_ids"].shape[1] + options["max_new_tokens"])
    begun = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(**inputs, **options, **shown)[0]
    seconds = time.perf_counter() - begun
    new = output[1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1] :]
    ends = model.generation_config.eos_token_id
    is_ended = len(new) > 0 and int(new[-1]) in (ends if isinstance(ends, list) else [ends])
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Answer(text, len(new), seconds, "stop" if is_ended else "length")


def say_why_empty(answer: Answer, advice: str) -> None:
    """One line on the error output if the answer has no letters; `advice` says what else can be tried."""
    if answer.text.strip():
        return
    if answer.finish_reason == "stop":
        reason = "the first token" if answer.new_tokens == 1 else f"token {answer.new_tokens}, after no letters,"
        said = f"{reason} that the model chose ends a text"
    else:
        said = f"none of its {answer.new_tokens} tokens are letters"
    print(f"the answer is empty: {said}. {advice}", file=sys.stderr)
