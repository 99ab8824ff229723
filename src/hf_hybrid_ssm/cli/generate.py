"""Continue a text with a checkpoint, word by word as it is generated:

    hf-hybrid-ssm generate FOLDER --prompt "It was a dark and" --max-new-tokens 100
    hf-hybrid-ssm generate FOLDER --temperature 0.8 --top-p 0.95 < prompt.txt
    hf-hybrid-ssm generate FOLDER --context book.safetensors --prompt "And then"

Greedy, unless the folder's generation_config.json says otherwise; with a sampling option, tokens are drawn.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hf_hybrid_ssm.cli.parsing import parser_of
from hf_hybrid_ssm.cli.read import continued

SAMPLING = ("temperature", "top_p", "top_k")


def main(arguments: list[str]) -> int:
    given = _parser().parse_args(arguments)
    import torch
    from transformers import TextStreamer, set_seed

    prompt = sys.stdin.read().removesuffix("\n") if given.prompt is None else given.prompt
    tokenizer, model = load(given.model, given.device, given.dtype)
    if given.seed is not None:
        set_seed(given.seed)
    options: dict[str, Any] = {"max_new_tokens": given.max_new_tokens}
    if given.context is None:
        inputs = _inputs(tokenizer, prompt).to(model.device)
    else:
        inputs, options["past_key_values"] = continued(given.context, tokenizer, model, prompt)
    sampling = {name: getattr(given, name) for name in SAMPLING if getattr(given, name) is not None}
    if given.sample or sampling:
        options |= {"do_sample": True} | sampling
    if not given.json:
        options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    begun = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(**inputs, **options)[0]
    seconds = time.perf_counter() - begun
    if given.json:
        new = output[1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        print(json.dumps({"prompt": prompt, "text": text, "new_tokens": len(new), "seconds": seconds}))
    return 0


def load(name: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    """Tokenizer and model of a folder, which is checked first, or of a name on the Hub.

    Raises:
        ValueError: the folder is damaged, or its model generates no text.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, logging

    from hf_hybrid_ssm.hub.contents import check_contents

    if Path(name).is_dir():
        check_contents(name)
    config = AutoConfig.from_pretrained(name)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if (kinds := config.architectures or []) and not any("LM" in k or "Generation" in k for k in kinds):
        raise ValueError(f"{name} holds a {kinds[0]}, which generates no text.")
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = auto.from_pretrained(name, dtype=dtype).eval()
    return tokenizer, model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _inputs(tokenizer: Any, prompt: str) -> Any:
    """Of an empty prompt: the token that texts begin with."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:
        begin = tokenizer.eos_token if tokenizer.bos_token is None else tokenizer.bos_token
        inputs = tokenizer(begin, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
    return inputs


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("generate", __doc__)
    parser.add_argument("model", metavar="FOLDER", help="a saved model with its tokenizer, or a name on the Hub")
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue; by default it is read from the input")
    parser.add_argument(
        "--context", metavar="PATH", help="what `hf-hybrid-ssm read` wrote: the prompt follows its text"
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=100, metavar="N", help="at most (default: %(default)s)"
    )
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    parser.add_argument("--temperature", type=float, metavar="T", help="below 1: likelier tokens more often")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the likeliest tokens of total share P")
    parser.add_argument("--top-k", type=_positive, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="the same text each time")
    parser.add_argument("--device", help="by default cuda where there is one")
    parser.add_argument("--dtype", default="auto", help="such as bfloat16 (default: as saved)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, for programs")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
