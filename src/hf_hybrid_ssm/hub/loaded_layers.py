"""Models whose layers came from their checkpoint: fine-tuning begins with a new head on them, and not with new layers.

Exported code has this module too, where `loading.py` is not.
"""

import re
from collections.abc import Callable
from typing import Any

WRAPPERS = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module)\.")
"""In the name of a tensor: DistributedDataParallel, torch.compile or FSDP was saved."""


def load_layers(usual: Callable[..., Any], source: Any, *args: Any, teacher: Any = None, **options: Any) -> Any:
    """What `from_pretrained` of transformers (`usual`) returns, if the layers are in the checkpoint.

    Raises:
        ValueError: a teacher is given; or as of `check_layers`.
    """
    if teacher is not None:
        raise ValueError(f"teacher={str(teacher)!r}: deltas need the package hf_hybrid_ssm.")
    tells = options.pop("output_loading_info", False)
    model, told = usual(source, *args, output_loading_info=True, **options)
    if source is not None and "state_dict" not in options:
        check_layers(model, source, told)
    return (model, told) if tells else model


def check_layers(model: Any, source: Any, told: dict[str, Any]) -> None:
    """Refuse a model all of whose base model is new, or with `needs_layers` all of its layers: embeddings alone may be
    what an encoder, asked for by its name, takes of a language model.

    Args:
        source: what it was loaded from.
        told: what `output_loading_info` tells of it.

    Raises:
        ValueError: none of them came from the checkpoint: it is of another stack, or was saved from a wrapper.
    """
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # which no report names
    names = {f"{prefix}{name}" for name, _ in model.base_model.named_parameters()}
    wanted = names - tied.keys() - set(tied.values())
    needed = wanted
    if getattr(model, "needs_layers", False):
        needed = {name for name in wanted if ".layers." in f".{name}"} or wanted
    if not wanted or not needed <= told["missing_keys"] or getattr(model, "may_be_new", False):
        return
    some = min(wanted)
    for name in sorted(told["unexpected_keys"]):
        if name.endswith(f".{some}") or WRAPPERS.sub("", name) in wanted:
            raise ValueError(
                f"{str(source)!r} was saved from a wrapper, as its {name!r} says: save the model inside of it instead."
            )
    own = type(model).__name__
    holds = next(iter(getattr(model.config, "architectures", None) or []), "another model")
    if holds != own:
        raise ValueError(
            f"{str(source)!r} holds a {holds}, and none of its layers are those of a {own}, which would be random: "
            f"load it as a {holds}, or make a new model with from_config."
        )
