"""Losses of held-out text: documents as they are trained, sliding windows, windows of growing length, n-grams."""

import sys
from collections.abc import Callable, Iterable, Iterator

from _lib.documents import begin_of, documents_of_files, token_ids

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def scored_documents(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> tuple[list[torch.Tensor], int]:
    """Documents as they are trained, (1 + tokens + 1,) each: beginning, text, end; and the texts' size in bytes.

    They hold at most `max_tokens` targets; a document that is cut there has no end.
    """
    documents: list[torch.Tensor] = []
    num_bytes, left = 0, sys.maxsize if max_tokens is None else max_tokens
    for text in texts:
        if left <= 0:
            break
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        targets = [*encoded["input_ids"], tokenizer.eos_token_id]
        if len(targets) == 1:
            continue
        if len(targets) > left:
            targets = targets[:left]
            text = text[: encoded["offset_mapping"][left - 1][1]]
        documents.append(torch.tensor([begin_of(tokenizer), *targets]))
        num_bytes += len(text.encode())
        left -= len(targets)
    if not documents:
        raise ValueError(f"max_tokens={max_tokens}: there is no text to score.")
    return documents, num_bytes


def rows_within(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[list[int]]:
    """Whole rows of `length` tokens from inside one document each, which begins with its beginning-of-text token."""
    for text in texts:
        ids = [begin_of(tokenizer), *token_ids([text], tokenizer)[0]]
        yield from (ids[start : start + length] for start in range(0, len(ids) - length + 1, length))


def long_texts(
    files: list[str], encode: Callable[[str], list[int]], length: int, count: int, column: str = "text"
) -> list[torch.Tensor]:
    """The first tokens of the first documents that are long enough, (1, length) each.

    Raises:
        ValueError: there are fewer than `count`.
    """
    found: list[torch.Tensor] = []
    for document in documents_of_files(files):
        if len(ids := encode(document[column])[:length]) == length:
            found.append(torch.tensor([ids]))
        if len(found) == count:
            return found
    raise ValueError(f"{count} texts are wanted: {len(found)} documents of {files} have {length} tokens.")


@torch.inference_mode()
def token_losses(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """-log p of tokens 1 ... L-1 given all before, (L - 1,) float32 nats; `tokens` is (L,)."""
    logits = model(tokens.unsqueeze(0).to(model.device), use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), tokens[1:].to(logits.device), reduction="none").cpu()


def windows(tokens: torch.Tensor, length: int, stride: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Overlapping pieces, and how many of the last tokens of each were in none before."""
    done = 1  # the first token has nothing before it
    for start in range(0, len(tokens), stride):
        piece = tokens[start : start + length]
        new = start + len(piece) - done
        if new > 0:
            yield piece, new
            done += new


def sliding_loss(model: PreTrainedModel, documents: list[torch.Tensor], length: int, stride: int) -> float:
    """Mean loss of all tokens but each document's first, which is its beginning.

    Each has at least `length - stride` tokens before it, where its document has them.
    """
    total, count = 0.0, 0
    pieces = [piece for document in documents for piece in windows(document, length, stride)]
    for piece, new in tqdm(pieces, desc="sliding window"):
        total += token_losses(model, piece)[-new:].double().sum().item()
        count += new
    return total / count


@torch.inference_mode()
def loss_at(model: PreTrainedModel, rows: torch.Tensor, length: int, shortest: int) -> float:
    """Mean loss of the tokens of `rows` that are first in no window of `shortest`, in windows of `length`."""
    windows = rows.reshape(-1, length)
    scored = torch.arange(1, length) % shortest != 0
    total = 0.0
    for window in windows.split(max(1, rows.shape[1] // length)):  # as many tokens at a time at every length
        window = window.to(model.device)
        logits = model(window, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none")
        total += losses[:, scored.to(losses.device)].double().sum().item()
    return total / (int(scored.sum()) * len(windows))


def unigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Mean -log p of the held-out tokens (nats), p by counts plus one."""
    return float(-np.log(_unigram(train, vocab_size)[held_out]).mean())


def bigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """The same given the token before: counts of pairs, interpolated with the unigram.

    The weight of the pairs is the one that is best on the held-out tokens themselves, to the baseline's advantage.
    """
    pairs = np.zeros((vocab_size, vocab_size), dtype=np.float32)
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    seen = pairs.sum(1)[held_out[:-1]]
    by_pair = pairs[held_out[:-1], held_out[1:]] / np.maximum(seen, 1)
    alone = _unigram(train, vocab_size)[held_out[1:]]
    losses = []
    for strength in (1, 2, 5, 10, 20, 50, 100, 200):  # Witten and Bell's form: trust pairs that were seen often
        weight = seen / (seen + strength)
        losses.append(-np.log(weight * by_pair + (1 - weight) * alone).mean())
    return float(min(losses))


def _unigram(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.bincount(tokens, minlength=vocab_size) + 1.0
    return counts / counts.sum()
