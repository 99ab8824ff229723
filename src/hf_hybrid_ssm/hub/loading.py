"""What `from_pretrained` of this package's models does beside transformers' own."""

import importlib
import os
from collections.abc import Callable
from typing import Any

from hf_hybrid_ssm.hub.delta_files import is_delta
from hf_hybrid_ssm.hub.verify_files import check_weights_if_local


def load(
    usual: Callable[..., tuple[Any, dict[str, Any]]],
    source: Any,
    *args: Any,
    teacher: str | os.PathLike | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """A model, and what `output_loading_info` tells: a delta with its teacher, a folder whose weights are all there.

    Args:
        usual: `from_pretrained` of transformers.
        source, teacher: as of `HybridPreTrainedModel.from_pretrained`.

    Raises:
        ValueError: a weight file is missing or truncated; or the teacher of a delta is not given, or is another one.
    """
    if teacher is not None or is_delta(source):
        delta = importlib.import_module("hf_hybrid_ssm.upcycle.delta")
        if (arguments := delta.loading_arguments(source, teacher, options)) is not None:
            model, told = usual(None, *args, **arguments)
            model.name_or_path = model.config.name_or_path = str(source)
            return model, told
    reads_others = {"subfolder", "variant", "gguf_file", "state_dict"} & options.keys()
    if not reads_others and options.get("use_safetensors") is not False:
        check_weights_if_local(source)
    return usual(source, *args, **options)
