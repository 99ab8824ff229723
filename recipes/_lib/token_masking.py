"""Masked language modelling: which tokens are hidden, and by what (BERT, arXiv 1810.04805)."""

from typing import Any

from _lib.span_corruption import MaskingCollator

import numpy as np
from transformers import PreTrainedTokenizerBase

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
