"""Checkpoint folders to be damaged, and content that would be executed by an unsafe load."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.tiny_models import build

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


@cache
def saved(variant: str, shards: bool = False) -> Path:
    """A folder with a tiny language model, in one file or several; one for all callers, who copy it."""
    folder = Path(mkdtemp(prefix="checkpoint-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build(variant).save_pretrained(folder, max_shard_size="8KB" if shards else "5GB")
    return folder


class Payload:
    """Unpickled, it would write a file; nothing may ever do so."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)
