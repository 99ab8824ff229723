"""States of the beginnings of texts in files, so that a conversation goes on after a restart.

Each file is a context (`hf_hybrid_ssm.serving.context`) whose name tells which model and which tokens it belongs to;
what a file says is checked again when it is loaded. Processes may share a folder: files are whole or not there.
"""

import contextlib
import hashlib
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Cache

from hf_hybrid_ssm.serving.context import Context, load_context, write_context
from hf_hybrid_ssm.serving.model_identity import model_identity

# digest of the model, number of tokens, and their digest
NAME = re.compile(r"prefix-([0-9a-f]{32})-([0-9]+)-[0-9a-f]{32}\.safetensors")


class PrefixFolder:
    """Contexts in a folder, the least recently used of which are deleted when they have more than `max_bytes`.

    Only files with a name that is given here (`prefix-`, a number between two digests, `.safetensors`) are read,
    counted and deleted. They hold the token ids of the texts, so a folder that is made here is the user's own to read.

    Raises:
        NotADirectoryError: `path` is a file.
        OSError: the folder cannot be made.
    """

    def __init__(self, path: str | os.PathLike, max_bytes: int):
        self.path, self.max_bytes = Path(path), max_bytes
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"folder={str(path)!r} is a file: name a folder, or one that is not there yet.")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._damaged: set[str] = set()  # files of which that was said
        self._last: tuple[str, dict[str, Any]] = ("", {})  # the last model as this process and as a file names it

    def longest(
        self, model: Any, identity: str, tokens: torch.Tensor, longer_than: int
    ) -> tuple[Cache, torch.Tensor] | None:
        """The states of the longest beginning of `tokens` (T,) that has more than so many, and its ids.

        Warns:
            UserWarning: a file is damaged; another one serves, or none.
        """
        fitting, files = [], self._files()
        self._damaged &= {path.name for path in files}  # of a file that is gone nothing is kept
        digest, read = hashlib.sha256(), 0
        own = [path for path in files if path.name.startswith(f"prefix-{identity[:32]}-")]
        for length, path in sorted((_length(path), path) for path in own):
            if longer_than < length <= len(tokens):
                digest.update(_ids(tokens[read:length]))
                read = length
                if path.name == _name(identity, length, digest.hexdigest()):
                    fitting.append((length, path))
        for length, path in sorted(fitting, reverse=True):
            if path.name in self._damaged:
                continue
            try:
                context = load_context(path, model)
                _check_plain(context, tokens[:length])
            except FileNotFoundError:  # another process needed its bytes
                continue
            except (OSError, ValueError) as error:
                self._damaged.add(path.name)
                warnings.warn(f"{path} does not serve: {error}", stacklevel=3)
                continue
            with contextlib.suppress(OSError):  # it is gone, or is somebody else's
                os.utime(path)
            return context.cache, tokens[:length]
        return None

    def write(self, model: Any, identity: str, tokens: torch.Tensor, cache: Cache) -> None:
        """The states after `tokens` (T,); a file that is there is marked as used.

        Warns:
            UserWarning: it cannot be written, on a full disk for one, or states hold NaN.
        """
        if len(tokens) == 0:
            return
        name = _name(identity, len(tokens), hashlib.sha256(_ids(tokens)).hexdigest())
        try:
            if (self.path / name).is_file():
                os.utime(self.path / name)
                return
            named = self._named(identity, model)
            write_context(cache, self.path / name, model, named, {"tokens": tokens.unsqueeze(0)})
            self._damaged.discard(name)
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
        named = (path for path in self.path.iterdir() if NAME.fullmatch(path.name))
        return [path for path in named if path.is_file() and not path.is_symlink()]

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


def _check_plain(context: Context, tokens: torch.Tensor) -> None:
    """A ValueError unless it holds these tokens (T,), without padding and documents, as those written here."""
    notes = [note for layer in context.cache.layers for note in _notes(layer)]
    read = None if context.tokens is None else context.tokens.cpu()
    same = read is not None and context.num_tokens == len(tokens) and torch.equal(read, tokens[None])
    if not same or context.attention_mask is not None or any(notes):
        raise ValueError(f"it is no text of {len(tokens)} tokens without padding and documents")


def _notes(layer: Any) -> Iterator[bool]:
    """Whether what a layer has noted says that there was padding or another document; a mask may say that all is
    text."""
    noted = getattr(layer, "packing_state", {}) | getattr(layer, "not_cached", {})
    return (bool((note != (name == "token_mask")).any()) for name, note in noted.items())


def _ids(tokens: torch.Tensor) -> bytes:
    return tokens.long().numpy().tobytes()


def _name(identity: str, length: int, digest: str) -> str:
    """Of the file with the states of a model after so many tokens, by a hash of their `_ids`."""
    return f"prefix-{identity[:32]}-{length}-{digest[:32]}.safetensors"


def _length(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[2]) if match else 0
