"""The model and the tokenizer that a command works with, and the device they run on."""

import argparse
import sys
from pathlib import Path
from typing import Any


def defect_of_device(name: str | None) -> str | None:
    """Why nothing runs on a device; None if something does."""
    import torch

    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        return "is not a device of torch, such as cpu, cuda or cuda:1"
    module: Any = getattr(torch, device.type, None)  # torch.cuda, torch.xpu, torch.mps, torch.cpu
    if not getattr(module, "is_available", lambda: False)():
        return f"is not available: this torch ({torch.__version__}) finds no such device. Leave it out, or give cpu"
    if device.index is not None and device.index >= module.device_count():
        return f"is not available: this machine has {module.device_count()} of them"
    return None


def loaded(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Any, Any]:
    """`load` of what the arguments of `add_model` name; a device that is not there is wrong usage."""
    if reason := defect_of_device(args.device):
        parser.error(f"argument --device: {args.device!r} {reason}")
    return load(args.model, args.device, args.dtype, args.teacher)


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
    from hf_hybrid_ssm.hub.saved_configuration import check_implementation
    from hf_hybrid_ssm.hub.verify import check_contents
    from hf_hybrid_ssm.hub.whole_models import load_whole

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
    model = load_whole(auto, name, dtype=dtype, trust_remote_code=False, **options).eval()
    return tokenizer, model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
