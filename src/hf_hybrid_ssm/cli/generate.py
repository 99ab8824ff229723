"""Continue a text with a checkpoint, word by word as it is generated.

Greedy, unless the folder's generation_config.json says otherwise; with a sampling option, tokens are drawn. The
prompt gets the special tokens that the tokenizer itself adds, and no others. No code of the folder is executed.

Examples:
    hf-hybrid-ssm generate FOLDER --prompt "It was a dark and" --max-new-tokens 100
    hf-hybrid-ssm generate FOLDER --temperature 0.8 --top-p 0.95 < prompt.txt
    hf-hybrid-ssm generate FOLDER --context book.safetensors --prompt "And then"
"""

import argparse
import json
import sys
import time
from typing import Any

from hf_hybrid_ssm.cli.loading import defect_of_device, load
from hf_hybrid_ssm.cli.parsing import add_device, add_dtype, add_json, add_teacher, check_is_folder, is_path, parser_of
from hf_hybrid_ssm.cli.read import continued

SAMPLING = ("temperature", "top_p", "top_k")


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    if is_path(args.model):
        check_is_folder(args.model)
    prompt = text_of(args.prompt)
    import torch
    from transformers import TextStreamer, set_seed

    if reason := defect_of_device(args.device):
        parser.error(f"argument --device: {args.device!r} {reason}")
    tokenizer, model = load(args.model, args.device, args.dtype, args.teacher)
    if args.seed is not None:
        set_seed(args.seed)
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
    if args.context is None:
        inputs = inputs_of(tokenizer, prompt).to(model.device)
    else:
        inputs, options["cache"] = continued(args.context, tokenizer, model, prompt)
    sampling = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if args.sample or sampling:
        options |= {"do_sample": True} | sampling
    if not args.json:
        options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    begun = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(**inputs, **options)[0]
    seconds = time.perf_counter() - begun
    if args.json:
        new = output[1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        print(json.dumps({"prompt": prompt, "text": text, "new_tokens": len(new), "seconds": seconds}))
    return 0


def text_of(prompt: str | None) -> str:
    """The prompt, by default the input without its last line break, as text: bytes that the locale did not read as
    letters are UTF-8.

    Raises:
        ValueError: they are not.
    """
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt is None else prompt
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
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


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("generate", __doc__)
    parser.add_argument(
        "model", metavar="FOLDER", help="folder of a saved model with its tokenizer, or a name on the Hub"
    )
    add_teacher(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue (default: it is read from the input)")
    parser.add_argument(
        "--context", metavar="FILE", help="file that `hf-hybrid-ssm read` wrote, whose text the prompt follows"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=100, metavar="N", help="new tokens at most (default: %(default)s)"
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
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the draws, for the same text each time")
    add_device(parser)
    add_dtype(parser)
    add_json(parser)
    return parser


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
