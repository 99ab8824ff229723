"""The files of a delta: what a student has that its teacher has not, and which teacher that is.

`delta.json` names the teacher and its fingerprint; `delta.safetensors` holds the tensors that the teacher does not
have, and those that training changed. All others are the teacher's of the same name. Reading these files reads nothing
else: where the teacher lies is for the user to say (`upcycle.delta`).
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_hybrid_ssm.hub.reading import read_any_json
from hf_hybrid_ssm.hub.writing import write_whole

DELTA = "delta.json"
DELTA_WEIGHTS = "delta.safetensors"
FORMAT = 3
WEIGHTS = (
    "model*.safetensors",
    SAFE_WEIGHTS_INDEX_NAME,
    DELTA,
    DELTA_WEIGHTS,
    "adapter_config.json",
    "adapter_model*",
)
TEXTS = (
    "generation_config.json", "tokenizer*.json", "tokenizer.model", "spiece.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class Delta:
    """What `delta.json` says.

    Attributes:
        teacher: a name on the Hub; of a folder or file the last part of its path.
        is_on_hub: True if `teacher` is a name on the Hub, False if it is part of a path.
        fingerprint: of all of the teacher's tensors (`fingerprint_of`), in the type that they were saved in.
        digest: `fingerprint_of` the tensors of the file.
    """

    teacher: str
    is_on_hub: bool
    fingerprint: str
    digest: str

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT} | asdict(self), indent=2)
        write_whole(folder / DELTA, f"{text}\n")


def is_delta(folder: object) -> bool:
    """Whether a folder of this machine holds a delta."""
    return isinstance(folder, str | os.PathLike) and (Path(folder) / DELTA).is_file()


def read_delta(folder: Path) -> Delta:
    """What `delta.json` says.

    Raises:
        ValueError: the file is not what `save_delta` writes, or whole weights lie beside it.
    """
    file = folder / DELTA
    content = read_any_json(file)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"{file} is not a delta of format {FORMAT}, which this version of hf-hybrid-ssm reads.")
    kinds = {"teacher": str, "is_on_hub": bool, "fingerprint": str, "digest": str}
    if content.keys() != kinds.keys() or not all(isinstance(content[name], kind) for name, kind in kinds.items()):
        raise ValueError(f"{file} must hold {', '.join(kinds)}, each of its type, and nothing else.")
    if not content["is_on_hub"] and Path(content["teacher"]).name != content["teacher"]:
        raise ValueError(f"{file}: teacher={content['teacher']!r} must be a name without its folder.")
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        if (folder / name).is_file():
            raise ValueError(
                f"{folder} holds both a delta ({DELTA}) and whole weights ({name}): move one of them away."
            )
    return Delta(**content)


def remove_weights(folder: Path) -> None:
    """Take away what an earlier save left, whole, delta or adapter, so that nothing contradicts the next: transformers
    puts an adapter on top of whole weights that lie beside it."""
    _remove(folder, WEIGHTS)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to save a model in, whose files come into `folder` once all are there. What an earlier save left of
    weights, tokenizer and settings of `generate` goes then; nothing does if the new save breaks off."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    try:
        yield beside
        _remove(folder, (*WEIGHTS, *TEXTS))
        shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
        for path in beside.iterdir():
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            else:
                os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _remove(folder: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            if path.is_file():
                path.unlink()
