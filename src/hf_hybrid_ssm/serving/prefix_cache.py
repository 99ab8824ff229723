"""States of the beginnings of texts, so that a conversation reads only what is new.

Keys and values can be cut off anywhere; a recurrent state cannot. So the states are copied at some places: every so
many tokens, at the end of a prompt, at the end of an answer, and where a text has left an earlier one. A text that
begins like one of them starts from the longest copy that it shares, by token ids: a chat template that tokenizes an
answer differently from how it was generated goes back to the copy before the first token that differs.
"""

import copy
import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import Cache, DynamicCache, StoppingCriteria, StoppingCriteriaList

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.models.outputs import CACHE
from hf_hybrid_ssm.models.state_layers import own_tensor
from hf_hybrid_ssm.serving.model_identity import identity_now
from hf_hybrid_ssm.serving.prefix_folder import PrefixFolder
from hf_hybrid_ssm.serving.prefix_request import Request

logger = logging.getLogger(__name__)
VARIABLE = "HF_HYBRID_SSM_PREFIX_CACHE"
FOLDER_VARIABLE = "HF_HYBRID_SSM_PREFIX_CACHE_FOLDER"
DEFAULT_BYTES = 2**30


@dataclass(frozen=True)
class _Snapshot:
    """The states after `tokens` (T,) int64 on the CPU, by the model of `identity`. Nobody writes to them."""

    identity: str
    tokens: torch.Tensor
    cache: Cache
    num_bytes: int


class PrefixCache:
    """States of earlier texts, for `generate(prefix_cache=...)`; the least recently used go first.

    ```python
    >>> prefix_cache = PrefixCache(max_bytes=2**30)
    >>> ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    >>> model.generate(ids, prefix_cache=prefix_cache)
    ```

    Texts are those without it, to rounding. States belong to the model that they were made with
    (`serving.model_identity`): after a training step, with another adapter, a changed attribute or another model a
    text is read anew. Where nothing says what a model computes (hooks, another `forward`, training mode), and where a
    call asks for what only a whole reading gives (`output_hidden_states`), it steps aside, and says so once. Threads
    may share one.

    Args:
        max_bytes: of all tensors that it holds: states, and eight bytes a token for the ids. Layers with full
            attention keep keys and values of all tokens in every copy.
        every: tokens between two copies of one text.
        folder: where the states after each prompt and each answer are kept as files too, so that a text goes on after
            a restart. It is made if it is not there. The files hold the ids of the texts.
        max_folder_bytes: of these files; the least recently used are deleted.

    Attributes:
        tokens_read: tokens of prompts that models have read through it, so far.
        tokens_reused: tokens of prompts that they did not have to read.

    Raises:
        ValueError: `max_bytes`, `every` or `max_folder_bytes` is not a positive whole number.
        NotADirectoryError: `folder` is a file.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_BYTES,
        every: int = 512,
        folder: str | os.PathLike | None = None,
        max_folder_bytes: int = 10 * 2**30,
    ):
        numbers = {"max_bytes": max_bytes, "every": every, "max_folder_bytes": max_folder_bytes}
        for name, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive whole number.")
        self.max_bytes, self.every = max_bytes, every
        self.tokens_read = self.tokens_reused = 0
        self._folder = None if folder is None else PrefixFolder(folder, max_folder_bytes)
        self._snapshots: OrderedDict[bytes, _Snapshot] = OrderedDict()  # the last one was used last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many copies it holds."""
        return len(self._snapshots)

    @property
    def num_bytes(self) -> int:
        """Of all tensors that it holds."""
        with self._lock:
            return self._held()

    def clear(self) -> None:
        """Forget all texts; files stay."""
        with self._lock:
            self._snapshots.clear()

    def why_not(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why it cannot serve a call of `generate`; None where it can."""
        return Request(model, args, kwargs).why_not()

    @torch.no_grad()
    def generate(self, model: Any, generate: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`generate(*args, **kwargs)` of a model, from the longest copy of its text's beginning.

        Raises:
            ValueError: it cannot serve this call (several rows, padding, beams, an assistant, a cache of its own ...).
        """
        request = Request(model, args, kwargs)
        if (reason := request.why_not()) is not None:
            raise ValueError(f"prefix_cache: {reason}.")
        if (reason := request.why_aside()) is not None:
            say_once(reason)
            return generate(*args, **kwargs)
        identity = identity_now(model)
        ids = request.ids
        assert ids is not None  # else there was a reason
        cache = self._read(model, identity, ids)
        prompt = self._find(identity, ids[0, :-1].cpu())[0] if self._folder is not None else None
        criteria = StoppingCriteriaList(request.arguments.get("stopping_criteria") or [])
        criteria.append(_Copying(self, identity, cache))
        output = generate(**request.arguments | {CACHE: cache, "stopping_criteria": criteria})
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self._keep(identity, sequences, cache)
        if self._folder is not None:
            if prompt is not None and len(prompt.tokens) == ids.shape[1] - 1:
                self._folder.write(model, identity, prompt.tokens, prompt.cache)
            self._folder.write(model, identity, _of(cache, sequences), cache)
        return output

    def _read(self, model: Any, identity: str, ids: torch.Tensor) -> Cache:
        """All of (1, L) but the last token, which `generate` needs for its first logits."""
        tokens = ids[0].cpu()
        snapshot, shared = self._find(identity, tokens[:-1])
        start = 0 if snapshot is None else len(snapshot.tokens)
        filed = None if self._folder is None else self._folder.longest(model, identity, tokens[:-1], start)
        if filed is not None:
            cache, start = filed[0], len(filed[1])
            self._keep(identity, ids[:, :start], cache)
        else:
            cache = DynamicCache(config=model.config) if snapshot is None else _copied(snapshot.cache)
        for begin, end in self._pieces(start, shared, len(tokens) - 1):
            model.get_decoder()(ids[:, begin:end], **{CACHE: cache}, use_cache=True)
            self._keep(identity, ids[:, :end], cache)
        with self._lock:
            self.tokens_reused += start
            self.tokens_read += len(tokens) - start
        return cache

    def _pieces(self, start: int, shared: int, end: int) -> Iterator[tuple[int, int]]:
        stops = {*range(self.every, end, self.every), shared, end}
        for stop in sorted(stop for stop in stops if start < stop <= end):
            yield start, stop
            start = stop

    def _find(self, identity: str, tokens: torch.Tensor) -> tuple[_Snapshot | None, int]:
        """The longest copy that `tokens` begin with, and how many tokens they share with any other text."""
        best, shared = None, 0
        with self._lock:
            for snapshot in self._snapshots.values():
                if snapshot.identity != identity:
                    continue
                common = _common_prefix(snapshot.tokens, tokens)
                shared = max(shared, common)
                if common == len(snapshot.tokens) and (best is None or common > len(best.tokens)):
                    best = snapshot
            if best is not None:
                self._snapshots.move_to_end(_key(best.identity, best.tokens))
        return best, shared

    def _keep(self, identity: str, ids: torch.Tensor, cache: Cache) -> None:
        """Copy the states of a cache, whose tokens are the first of `ids` (1, T)."""
        tokens = _of(cache, ids)
        key = _key(identity, tokens)
        with self._lock:
            if key in self._snapshots:
                self._snapshots.move_to_end(key)
                return
        copy = _copied(cache)
        snapshot = _Snapshot(identity, tokens, copy, sum(map(_bytes, _tensors(copy))) + _bytes(tokens))
        if snapshot.num_bytes > self.max_bytes:
            return
        with self._lock:
            self._snapshots[key] = snapshot
            while self._held() > self.max_bytes:
                self._snapshots.popitem(last=False)

    def _held(self) -> int:
        return sum(snapshot.num_bytes for snapshot in self._snapshots.values())


class _Copying(StoppingCriteria):
    """Stops nothing: called after every token, it copies the states of a long answer now and then."""

    def __init__(self, prefix_cache: PrefixCache, identity: str, cache: Cache):
        self.prefix_cache, self.identity, self.cache = prefix_cache, identity, cache

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if int(self.cache.get_seq_length()) % self.prefix_cache.every == 0:
            self.prefix_cache._keep(self.identity, input_ids, self.cache)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _of(cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    """Those of `ids` (1, T) that a cache has read, (t,) on the CPU."""
    return ids[0, : int(cache.get_seq_length())].cpu().clone()


def _key(identity: str, tokens: torch.Tensor) -> bytes:
    return hashlib.sha256(identity.encode() + tokens.numpy().tobytes()).digest()


def _common_prefix(one: torch.Tensor, other: torch.Tensor) -> int:
    length = min(len(one), len(other))
    differs = (one[:length] != other[:length]).nonzero()
    return int(differs[0]) if len(differs) else length


def _copied(cache: Cache) -> Cache:
    """With tensors of its own, each of no more memory than its numbers; without a recorded past."""
    twin = copy.copy(cache)
    twin.layers = [
        layer.copy() if is_recurrent_state_layer(layer) else _of_transformers(layer) for layer in cache.layers
    ]
    return twin


def _of_transformers(layer: Any) -> Any:
    """A copy of one of transformers' own layers, whose tensors are attributes or in dictionaries."""
    own = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(own, name, own_tensor(value))
        elif isinstance(value, dict):
            setattr(own, name, {key: own_tensor(inner) for key, inner in value.items()})
        elif isinstance(value, list):
            setattr(own, name, [])
    return own


def _tensors(cache: Cache) -> Iterator[torch.Tensor]:
    for layer in cache.layers:
        for value in vars(layer).values():
            inner = value.values() if isinstance(value, dict) else (value,)
            yield from (tensor for tensor in inner if isinstance(tensor, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@lru_cache(maxsize=64)
def say_once(reason: str) -> None:
    """Warn that a cache of prefixes steps aside: a text that is read anew looks like any other."""
    logger.warning("prefix_cache does not serve a call of generate, which reads its whole text: %s", reason)


def generate(model: Any, usual: Callable, prefix_cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`usual(*args, **kwargs)`, the `generate` of a model, through a cache of prefixes; None: through that of the
    process, where there is one that can serve this call.

    Raises:
        TypeError: it is no `PrefixCache`.
    """
    if prefix_cache is None:
        prefix_cache = of_process()
        reason = None if prefix_cache is None else prefix_cache.why_not(model, args, kwargs)
        if reason is not None:
            say_once(reason)
        if prefix_cache is None or reason is not None:
            return usual(*args, **kwargs)
    if not hasattr(prefix_cache, "generate"):
        raise TypeError(f"prefix_cache must be a PrefixCache, got {type(prefix_cache).__name__}.")
    return prefix_cache.generate(model, usual, args, kwargs)


def of_process() -> PrefixCache | None:
    """The cache of calls that name none, by two variables of the environment: as many bytes as
    `HF_HYBRID_SSM_PREFIX_CACHE` says (0: none; a GiB if only the other one is set), and files in the folder that
    `HF_HYBRID_SSM_PREFIX_CACHE_FOLDER` names.

    Raises:
        ValueError: the first is not a whole number.
        NotADirectoryError: the second is a file.
    """
    folder = os.environ.get(FOLDER_VARIABLE) or None
    asked = os.environ.get(VARIABLE, "0" if folder is None else str(DEFAULT_BYTES))
    if not asked.isdecimal():
        raise ValueError(f"{VARIABLE}={asked!r} must be a number of bytes, 0 for none.")
    return _of_bytes(int(asked), folder) if int(asked) else None


@lru_cache(maxsize=1)
def _of_bytes(max_bytes: int, folder: str | None) -> PrefixCache:
    return PrefixCache(max_bytes, folder=folder)
