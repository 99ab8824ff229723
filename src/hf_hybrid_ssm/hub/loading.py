"""What `from_pretrained` of this package's models does beside transformers' own."""

import importlib
import os
from collections.abc import Callable
from typing import Any

from hf_hybrid_ssm.hub.delta_files import is_delta
from hf_hybrid_ssm.hub.loaded_layers import check_layers, load_layers
from hf_hybrid_ssm.hub.verify_files import check_weights_if_local


def load(
    usual: Callable[..., Any],
    source: Any,
    *args: Any,
    teacher: str | os.PathLike | None = None,
    **options: Any,
) -> Any:
    """What `usual` returns, of a delta with its teacher, or of a folder whose weights are all there.

    Args:
        usual: `from_pretrained` of transformers.
        source, teacher: as of `HybridPreTrainedModel.from_pretrained`.

    Raises:
        ValueError: a weight file is missing or truncated; the teacher of a delta is not given, or is another one; or
            as of `check_layers`.
    """
    if teacher is not None or is_delta(source):
        delta = importlib.import_module("hf_hybrid_ssm.upcycle.delta")
        if (arguments := delta.loading_arguments(source, teacher, options)) is not None:
            model, told = usual(None, *args, **arguments | {"output_loading_info": True})
            model.name_or_path = model.config.name_or_path = str(source)
            check_layers(model, source, told)
            delta.set_generation(model, source, options)
            return (model, told) if options.get("output_loading_info") else model
    reads_others = {"subfolder", "variant", "gguf_file", "state_dict"} & options.keys()
    if not reads_others and options.get("use_safetensors") is not False:
        check_weights_if_local(source)
    return load_layers(usual, source, *args, **options)
