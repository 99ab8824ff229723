"""What is hidden of a text, to be restored: spans (T5, arXiv 1910.10683) or single tokens (BERT, arXiv 1810.04805).

T5 replaces spans by sentinels, and the target restores them:

text     Thank you for inviting me to your party last week
input    Thank you <extra_id_0> me to your party <extra_id_1> week </s>
target   <extra_id_0> for inviting <extra_id_1> last </s>
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback


def noise_of(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """How many of `length` tokens are noise, in how many spans; T5's rounding."""
    tokens = min(max(round(length * density), 1), length - 1)
    return tokens, min(max(round(tokens / mean_span), 1), length - tokens)


def text_length(input_length: int, density: float, mean_span: float) -> tuple[int, int]:
    """The longest text whose corrupted input has at most `input_length` tokens, and the length of its target.

    Both count a sentinel for each span and the end-of-text token: 568 and 114 for T5's 512, 0.15, 3.
    """

    def corrupted(length: int) -> tuple[int, int]:
        tokens, spans = noise_of(length, density, mean_span)
        return length - tokens + spans + 1, tokens + spans + 1

    length = input_length
    if corrupted(length)[0] > input_length:
        length = next((n for n in range(input_length, 1, -1) if corrupted(n)[0] <= input_length), 0)
    while length and corrupted(length + 1)[0] <= input_length:
        length += 1
    if not length:
        raise ValueError(f"sequence_length={input_length} is too short for any span.")
    return length, corrupted(length)[1]


def noise_mask(length: int, density: float, mean_span: float, random: np.random.Generator) -> np.ndarray:
    """(length,) bool: text, noise, text, noise, ...; all divisions into spans of at least 1 token are equally
    likely."""
    tokens, spans = noise_of(length, density, mean_span)

    def lengths(total: int) -> np.ndarray:
        borders = np.sort(random.choice(total - 1, spans - 1, replace=False)) + 1
        return np.diff(np.concatenate([[0], borders, [total]]))

    runs = np.stack([lengths(length - tokens), lengths(tokens)], 1).reshape(-1)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def corrupt(
    tokens: Sequence[int], mask: np.ndarray, sentinels: Sequence[int], end: int
) -> tuple[list[int], list[int]]:
    """Tokens → input and target; each masked span has its sentinel in both, and both end with `end`."""
    inputs: list[int] = []
    target: list[int] = []
    span, before = -1, False
    for token, masked in zip(tokens, mask.tolist(), strict=True):
        if masked and not before:
            span += 1
            inputs.append(sentinels[span])
            target.append(sentinels[span])
        (target if masked else inputs).append(token)
        before = masked
    return [*inputs, end], [*target, end]


def sentinels_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of `<extra_id_0>`, `<extra_id_1>`, ..., as many as the tokenizer knows."""
    known = tokenizer.get_vocab()
    found: list[int] = []
    while (name := f"<extra_id_{len(found)}>") in known:
        found.append(known[name])
    return found


class MaskingCollator:
    """Data collator: rows of tokens, of which `corrupted` hides some → `input_ids`, `attention_mask`, `labels`.

    What is masked depends on the seed, the epoch and the row's number alone, so that a resumed run sees what an
    uninterrupted one does, in any order and with any number of workers. Rows that have `labels` are taken as they are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int):
        self.pad, self.end, self.seed = tokenizer.pad_token_id, tokenizer.eos_token_id, seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers have to see it change

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def random_of(self, row: dict[str, Any]) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.epoch, row["row"]])

    def corrupted(self, row: dict[str, Any]) -> dict[str, list[int]]:
        """One row of `input_ids` and `row`, its number → what the model reads, and its labels."""
        raise NotImplementedError

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [row if "labels" in row else self.corrupted(row) for row in rows]
        inputs = _padded([row["input_ids"] for row in rows], self.pad)
        mask = _padded([[1] * len(row["input_ids"]) for row in rows], 0)
        return {"input_ids": inputs, "attention_mask": mask, "labels": _padded([row["labels"] for row in rows], -100)}


class SpanCorruption(MaskingCollator):
    """Spans are replaced by sentinels, and the labels are the spans.

    Raises:
        ValueError: the tokenizer has too few sentinels for rows of `length` tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, length: int, density: float = 0.15, mean_span: float = 3.0, seed=0
    ):
        super().__init__(tokenizer, seed)
        self.density, self.mean_span, self.sentinels = density, mean_span, sentinels_of(tokenizer)
        spans = noise_of(length, density, mean_span)[1]
        if spans > len(self.sentinels):
            raise ValueError(
                f"rows of {length} tokens have {spans} spans, but the tokenizer knows {len(self.sentinels)} sentinels "
                "(<extra_id_0>, <extra_id_1>, ...)."
            )

    def corrupted(self, row: dict[str, Any]) -> dict[str, list[int]]:
        mask = noise_mask(len(row["input_ids"]), self.density, self.mean_span, self.random_of(row))
        inputs, target = corrupt(row["input_ids"], mask, self.sentinels, self.end)
        return {"input_ids": inputs, "labels": target}


def _padded(rows: list[list[int]], fill: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


class NewMasksEachEpoch(TrainerCallback):
    """Tells the collator which epoch it is."""

    def __init__(self, collator: MaskingCollator):
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.collator.epoch = int((state.epoch or 0) + 1e-6)


MASK, RANDOM = 0.8, 0.1  # of the hidden tokens: the mask token, a random one; the others stay as they are


class TokenMasking(MaskingCollator):
    """A fraction of the tokens is to be predicted, never special ones; the labels are -100 elsewhere.

    Raises:
        ValueError: the tokenizer has no mask token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, fraction: float = 0.15, seed: int = 0):
        super().__init__(tokenizer, seed)
        if tokenizer.mask_token_id is None:
            raise ValueError("the tokenizer needs a mask token.")
        self.mask, self.tokens, self.fraction = tokenizer.mask_token_id, len(tokenizer), fraction
        self.special = tokenizer.all_special_ids

    def corrupted(self, row: dict[str, Any]) -> dict[str, list[int]]:
        random, tokens = self.random_of(row), np.array(row["input_ids"])
        places = np.flatnonzero(~np.isin(tokens, self.special))
        hidden = random.choice(places, round(self.fraction * len(places)), replace=False)
        masked, drawn = np.split(hidden, np.cumsum([round(MASK * len(hidden)), round(RANDOM * len(hidden))]))[:2]
        labels, inputs = np.full_like(tokens, -100), tokens.copy()
        labels[hidden] = tokens[hidden]
        inputs[masked], inputs[drawn] = self.mask, random.integers(self.tokens, size=len(drawn))
        return {"input_ids": inputs.tolist(), "labels": labels.tolist()}
