"""Continue a text with a checkpoint, word by word as it is generated:

    hf-hybrid-ssm generate FOLDER --prompt "It was a dark and" --max-new-tokens 100
    hf-hybrid-ssm generate FOLDER --temperature 0.8 --top-p 0.95 < prompt.txt
    hf-hybrid-ssm generate FOLDER --context book.safetensors --prompt "And then"

Greedy, unless the folder's generation_config.json says otherwise; with a sampling option, tokens are drawn. The
prompt gets the special tokens that the tokenizer itself adds, and no others. No code of the folder is executed.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hf_hybrid_ssm.cli.parsing import add_teacher, check_is_folder, is_path, parser_of
from hf_hybrid_ssm.cli.read import continued

SAMPLING = ("temperature", "top_p", "top_k")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def main(arguments: list[str]) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if is_path(given.model):
        check_is_folder(given.model)
    prompt = text_of(given.prompt)
    import torch
    from transformers import TextStreamer, set_seed

    if reason := defect_of_device(given.device):
        parser.error(f"argument --device: {given.device!r} {reason}")
    tokenizer, model = load(given.model, given.device, given.dtype, given.teacher)
    if given.seed is not None:
        set_seed(given.seed)
    options: dict[str, Any] = {"max_new_tokens": given.max_new_tokens}
    if given.context is None:
        inputs = inputs_of(tokenizer, prompt).to(model.device)
    else:
        inputs, options["cache"] = continued(given.context, tokenizer, model, prompt)
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


def defect_of_device(name: str | None) -> str | None:
    """Why nothing runs on a device; None if something does."""
    import torch

    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        return "is not a device of torch, such as cpu, cuda or cuda:1"
    module = getattr(torch, device.type, None)  # torch.cuda, torch.xpu, torch.mps, torch.cpu
    if not getattr(module, "is_available", lambda: False)():
        return f"is not available: this torch ({torch.__version__}) finds no such device. Leave it out, or give cpu"
    if device.index is not None and device.index >= module.device_count():  # type: ignore[union-attr]
        return f"is not available: this machine has {module.device_count()} of them"  # type: ignore[union-attr]
    return None


def load(name: str, device: str | None, dtype: str, teacher: str | None = None) -> tuple[Any, Any]:
    """Tokenizer and model of a folder, which is checked first, or of a name on the Hub. No code of either is executed.

    Args:
        teacher: of a delta, as the user gives it.

    Raises:
        ValueError: the folder is damaged, its model generates no text, it holds no tokenizer, or it is a delta whose
            teacher is not given.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, logging

    from hf_hybrid_ssm.hub.delta_files import is_delta
    from hf_hybrid_ssm.hub.one_line import in_one_line
    from hf_hybrid_ssm.hub.verify_tensors import check_contents
    from hf_hybrid_ssm.models.saved_configuration import check_implementation

    if Path(name).is_dir():
        check_contents(name)
    else:
        print(f"there is no folder {name!r} here; the Hub is asked for a model of that name", file=sys.stderr)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    check_implementation("attn_implementation", config._attn_implementation)  # of a family of transformers' own
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    known = auto._model_mapping.get(type(config), ())  # one class or several
    generating = {kind.__name__ for kind in (known if isinstance(known, tuple | list) else (known,))}
    if not generating.intersection(config.architectures or generating):
        raise ValueError(f"{name} holds a {config.architectures[0]}, which generates no text.")
    logging.disable_progress_bar()
    options = {} if teacher is None else {"teacher": teacher}
    if teacher is not None and not is_delta(name):
        raise ValueError(f"--teacher {teacher} is for a delta, and {name!r} is none: leave it out.")
    try:
        if is_delta(name):
            from hf_hybrid_ssm.upcycle.delta import tokenizer_of

            tokenizer = tokenizer_of(name, teacher)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (ValueError, OSError):
        raise
    except Exception as error:  # whatever a wrong file raises
        raise ValueError(f"{name} holds no tokenizer that can be read: {in_one_line(error)}") from error
    model = auto.from_pretrained(name, dtype=dtype, trust_remote_code=False, **options).eval()
    return tokenizer, model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


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


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("generate", __doc__)
    parser.add_argument("model", metavar="FOLDER", help="a saved model with its tokenizer, or a name on the Hub")
    add_teacher(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue; by default it is read from the input")
    parser.add_argument(
        "--context", metavar="PATH", help="what `hf-hybrid-ssm read` wrote: the prompt follows its text"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=100, metavar="N", help="at most (default: %(default)s)"
    )
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    parser.add_argument("--temperature", type=float, metavar="T", help="below 1: likelier tokens more often")
    parser.add_argument("--top-p", type=share, metavar="P", help="draw among the likeliest tokens of total share P")
    parser.add_argument("--top-k", type=positive, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="the same text each time")
    parser.add_argument("--device", help="by default cuda where there is one")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as saved)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, for programs")
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
