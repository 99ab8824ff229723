"""States of the beginnings of texts in files, so that a conversation goes on after a restart.

Each file is a context (`hf_hybrid_ssm.serving.context`) whose name tells which model it belongs to; what a file says
is checked again when it is loaded. Processes may share a folder: files are whole or not there.
"""

import contextlib
import hashlib
import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import Cache

from hf_hybrid_ssm.serving.context import Context, load_context, write_context
from hf_hybrid_ssm.serving.model_identity import model_identity

NAME = re.compile(r"prefix-([0-9a-f]{32})-[0-9a-f]{32}\.safetensors")  # digests of the model and of the tokens


class PrefixFolder:
    """Contexts in a folder, the least recently used of which are deleted when they have more than `max_bytes`.

    Only files with a name that is given here (`prefix-`, two digests, `.safetensors`) are read, counted and deleted.
    They hold the token ids of the texts, so a folder that is made here is the user's own to read.

    Raises:
        NotADirectoryError: `path` is a file.
        OSError: the folder cannot be made.
    """

    def __init__(self, path: str | os.PathLike, max_bytes: int):
        self.path, self.max_bytes = Path(path), max_bytes
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"folder={str(path)!r} is a file: name a folder, or one that is not there yet.")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tokens: dict[str, torch.Tensor | None] = {}  # of a file; None: it is damaged, which was said once
        self._last: tuple[str, dict[str, Any]] = ("", {})  # the last model as this process and as a file names it
        self._lock = threading.Lock()

    def longest(
        self, model: Any, identity: str, tokens: torch.Tensor, longer_than: int
    ) -> tuple[Cache, torch.Tensor] | None:
        """The states of the longest beginning of `tokens` (T,) that has more than so many, and its ids.

        Warns:
            UserWarning: a file is damaged; another one serves, or none.
        """
        group = _group(identity)
        files = self._files()
        with self._lock:  # of a file that is gone nothing is kept
            self._tokens = {path.name: self._tokens[path.name] for path in files if path.name in self._tokens}
        names = [path.name for path in files if _group_of(path) == group]
        found = {name: ids for name in names if (ids := self._ids(name)) is not None}
        fitting = [
            (len(ids), name)
            for name, ids in found.items()
            if longer_than < len(ids) <= len(tokens) and torch.equal(tokens[: len(ids)], ids)
        ]
        for length, name in sorted(fitting, reverse=True):
            try:
                context = load_context(self.path / name, model)
                _check_plain(context, length)
            except FileNotFoundError:  # another process needed its bytes
                continue
            except (OSError, ValueError) as error:
                self._is_damaged(name, error)
                continue
            with contextlib.suppress(OSError):  # it is gone, or is somebody else's
                os.utime(self.path / name)
            return context.cache, found[name]
        return None

    def write(self, model: Any, identity: str, tokens: torch.Tensor, cache: Cache) -> None:
        """The states after `tokens` (T,); a file that is there is marked as used.

        Warns:
            UserWarning: it cannot be written, on a full disk for one, or states hold NaN.
        """
        if len(tokens) == 0:
            return
        name = f"prefix-{_group(identity)}-{_digest(tokens.numpy().tobytes())}.safetensors"
        try:
            if (self.path / name).is_file():
                os.utime(self.path / name)
                return
            named = self._named(identity, model)
            write_context(cache, self.path / name, model, named, {"tokens": tokens.unsqueeze(0)})
            with self._lock:
                self._tokens[name] = tokens
            self._delete_the_oldest(name)
        except (OSError, ValueError) as error:  # the answer is there, and must not be lost for it
            warnings.warn(f"{self.path / name} was not written: {error}", stacklevel=2)

    def _named(self, identity: str, model: Any) -> dict[str, Any]:
        """What a file says of the model: worked out once, as a fingerprint takes longer than `identity_now`."""
        known, named = self._last
        if known != identity:
            named = model_identity(model)
            self._last = (identity, named)
        return named

    def _files(self) -> list[Path]:
        """Those of contexts; not a link, which may lead anywhere."""
        named = (path for path in self.path.iterdir() if _group_of(path) is not None)
        return [path for path in named if path.is_file() and not path.is_symlink()]

    def _ids(self, name: str) -> torch.Tensor | None:
        with self._lock:
            if name in self._tokens:
                return self._tokens[name]
        try:
            with safe_open(self.path / name, framework="pt") as file:
                tokens = file.get_slice("tokens")
                shape, dtype = tokens.get_shape(), tokens.get_dtype()
                if len(shape) != 2 or shape[0] != 1 or shape[1] < 1 or dtype != "I32":
                    raise ValueError(f"tokens must have shape (1, at least 1) and dtype I32, got {shape} and {dtype}")
                ids = tokens[:][0].long()
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            self._is_damaged(name, error)
            return None
        with self._lock:
            self._tokens[name] = ids
        return ids

    def _is_damaged(self, name: str, error: Exception) -> None:
        with self._lock:
            self._tokens[name] = None
        warnings.warn(f"{self.path / name} does not serve: {error}", stacklevel=4)

    def _delete_the_oldest(self, but: str) -> None:
        """Until the rest has no more bytes than it may; what was written last stays if it is small enough."""
        files = []
        for path in self._files():
            try:
                files.append((path.name == but, path.stat().st_mtime_ns, path.stat().st_size, path))
            except FileNotFoundError:
                continue
        held = sum(size for _, _, size, _ in files)
        for _, _, size, path in sorted(files):
            if held <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            held -= size


def _check_plain(context: Context, length: int) -> None:
    """A ValueError unless it holds a text of so many tokens, without padding and documents, as those written here."""
    notes = [note for layer in context.cache.layers for note in _notes(layer)]
    if context.num_tokens != length or context.attention_mask is not None or any(notes):
        raise ValueError(f"it is no text of {length} tokens without padding and documents")


def _notes(layer: Any) -> Iterator[bool]:
    """Whether what a layer has noted says that there was padding or another document; a mask may say that all is
    text."""
    noted = getattr(layer, "packing_state", {}) | getattr(layer, "not_cached", {})
    return (bool((note != (name == "token_mask")).any()) for name, note in noted.items())


def _group(identity: str) -> str:
    """What the names of all files of this model have in common."""
    return identity[:32]


def _group_of(path: Path) -> str | None:
    """That of a file; None for one whose name is not given here."""
    match = NAME.fullmatch(path.name)
    return None if match is None else match[1]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
