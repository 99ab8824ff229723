"""What can be said against a teacher before torch and transformers are imported, which takes seconds."""

import os
from pathlib import Path

from hf_hybrid_ssm.hub.gguf_config import config_fields
from hf_hybrid_ssm.hub.gguf_header import read_header


def refuse_early(path_or_name: str | os.PathLike) -> None:
    """Raise what `load_teacher` would, as far as the head of a GGUF file or a folder's config.json says it. What
    passes may still be refused later.

    Raises:
        FileNotFoundError, ImportError, ValueError: as of `load_teacher`.
    """
    path = Path(path_or_name)
    if path.is_file() or path.suffix == ".gguf":
        header = read_header(path)
        config_fields(header)
        header.check_complete()
    elif os.path.lexists(path / "config.json"):
        from hf_hybrid_ssm.hub.verify_files import read_config  # imports some of transformers

        read_config(path)


def refuse_own_folder(folder: str | os.PathLike, teacher: str | os.PathLike | None) -> None:
    """
    Raises:
        ValueError: what is to be written would replace the teacher.
    """
    if teacher is not None and Path(teacher).exists() and Path(teacher).resolve() == Path(folder).resolve():
        raise ValueError(f"{str(folder)!r} is the teacher's own folder: name another one.")
