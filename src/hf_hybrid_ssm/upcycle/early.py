"""What can be said against a teacher before torch and transformers are imported, which takes seconds."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_hybrid_ssm.hub.gguf_config import config_fields
from hf_hybrid_ssm.hub.gguf_header import read_header
from hf_hybrid_ssm.upcycle.teachers import FUSED, check_model_type, check_teacher


def refuse_early(path_or_name: str | os.PathLike) -> None:
    """Raise what `load_teacher` would, as far as the head of a GGUF file or a folder's config.json says it. What
    passes may still be refused later.

    Raises:
        FileNotFoundError, ImportError, ValueError: as of `load_teacher`.
    """
    path = Path(path_or_name)
    if path.is_file() or path.suffix == ".gguf":
        header = read_header(path)
        config: Any = SimpleNamespace(**config_fields(header))
        header.check_complete()
        if config.model_type not in FUSED:
            check_teacher(config)
    elif os.path.lexists(path / "config.json"):
        from hf_hybrid_ssm.hub.verify_files import read_config  # imports some of transformers

        config = SimpleNamespace(**read_config(path))
        if getattr(config, "model_type", None) is not None and config.model_type not in FUSED:
            check_model_type(config)
