"""Prompts that ask for what was said long before, made without data: of made sentences, or of token ids.

With a tokenizer: sentences of a small grammar with facts of seven kinds among them (a phone number, a price, a trade),
more than a window of further sentences, and a question about one of them, in the chat template where there is one; the
answer follows. The prompts of a text are alike up to the question. Without a tokenizer: keys, each followed by its
value of a few tokens, all random and different, many others, and the keys and values again, in another order.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

from hf_hybrid_ssm.evaluation.recall_tasks.filler import sentences
from hf_hybrid_ssm.evaluation.recall_tasks.kinds import HELD_IN
from hf_hybrid_ssm.evaluation.recall_tasks.real_texts import Asked, real_texts

LEAST_WORDS = 500
"""A vocabulary with fewer words of its own is asked for token ids."""
WINDOWS = 8
"""Of a prompt. Layers that recall over one window need not over many."""
COUNT = 8
"""Of token ids; of sentences there are `TEXTS`, each with a prompt of every kind."""
TEXTS = 2
FACTS = 8
"""At most, of token ids; in sentences one is asked for at a time, since a small model mixes up many answers."""
VALUE_TOKENS = 3


@dataclass(frozen=True)
class RecallPrompt:
    """One prompt with its answers.

    Attributes:
        input_ids: (1, L).
        positions: of the tokens to recall, (N,); each follows its fact by more than the window.
        question: where the question begins, or one token before: a position.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    question: int


def recall_prompts(
    tokenizer: Any | None,
    vocab_size: int,
    window: int,
    windows: int = WINDOWS,
    count: int | None = None,
    seed: int = 0,
) -> list[RecallPrompt]:
    """Prompts whose answers lie more than a window before the question.

    Args:
        tokenizer: of transformers; None, or one with few words of its own: random token ids.
        vocab_size: token ids lie below it.
        window: tokens between a fact and its question, at least.
        windows: how many long a prompt is, about; sentences have their facts anywhere, token ids at the beginning.
        count: of prompts; None: two texts of sentences with seven each, or eight of token ids.

    Raises:
        ValueError: a number is not positive, or the vocabulary is too small.
    """
    for name, value in (("window", window), ("windows", windows), ("count", count)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if tokenizer is not None and len(words_of(tokenizer)) >= LEAST_WORDS:
        kinds, length = tuple(HELD_IN), windows * window
        texts = TEXTS if count is None else math.ceil(count / len(kinds))
        made = real_texts(tokenizer, (), length, texts, window, kinds, seed, is_longer=True)
        return [_prompt(text.shared, asked) for text in made for asked in text.asked][:count]
    draw = random.Random(seed)
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    tokens = sorted(set(range(vocab_size)) - special)
    facts = min(FACTS, len(tokens) // (2 * (1 + VALUE_TOKENS)))
    if facts < 1:
        raise ValueError(
            f"vocab_size={vocab_size} leaves {len(tokens)} tokens: {1 + VALUE_TOKENS} for a key and its value are "
            "at most half of them, the others lie between."
        )
    return [
        _in_tokens(tokens, max(1, windows - 1) * window, facts, draw) for _ in range(COUNT if count is None else count)
    ]


def _prompt(shared: torch.Tensor, asked: Asked) -> RecallPrompt:
    ids = torch.cat([shared, asked.ids], 1)
    length = ids.shape[1]
    return RecallPrompt(ids, torch.arange(length - len(asked.answer), length), shared.shape[1])


def made_text(tokenizer: Any | None, length: int) -> torch.Tensor | None:
    """Sentences of the small grammar, in the chat template where there is one: (1, length); None without a tokenizer
    that has words."""
    if tokenizer is None or len(words_of(tokenizer)) < LEAST_WORDS:
        return None
    filler, text = sentences(random.Random(0)), ""
    ids: list[int] = []
    while len(ids) < length:
        text = " ".join([text, *(next(filler) for _ in range(length // 8))]).strip()
        ids = tokenizer(_opening(tokenizer, text), add_special_tokens=False)["input_ids"]
    return torch.tensor([ids[:length]])


def words_of(tokenizer: Any) -> list[str]:
    """The lower-case words of three to nine letters that are one token after a space, in alphabetical order."""
    special, found = set(tokenizer.all_special_ids), set()
    for token in sorted(tokenizer.get_vocab().values()):
        word = "" if token in special else tokenizer.decode([token]).strip()
        if 3 <= len(word) <= 9 and word.isalpha() and word.islower():
            found.add(word)
    words = sorted(found)
    rows = tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"] if words else []
    return [word for word, ids in zip(words, rows) if len(ids) == 1 and tokenizer.decode(ids).strip() == word]


def _opening(tokenizer: Any, text: str) -> str:
    """What the answers follow: a user's message in the chat template, or the text after the tokenizer's own start."""
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return f"{tokenizer.bos_token or ''}{text}\n\n"


def _in_tokens(tokens: list[int], between: int, facts: int, draw: random.Random) -> RecallPrompt:
    drawn = draw.sample(tokens, facts * (1 + VALUE_TOKENS))
    pairs = [drawn[start : start + 1 + VALUE_TOKENS] for start in range(0, len(drawn), 1 + VALUE_TOKENS)]
    others = sorted(set(tokens) - set(drawn))
    ids = [*drawn, *draw.choices(others, k=between)]
    start = len(ids) - 1
    positions: list[int] = []
    for pair in draw.sample(pairs, facts):
        positions += range(len(ids) + 1, len(ids) + len(pair))
        ids += pair
    return RecallPrompt(torch.tensor([ids]), torch.tensor(positions), start)
