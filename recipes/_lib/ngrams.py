"""Perplexity of n-gram counts: what a model must beat to have learnt more than frequencies."""

import numpy as np


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
