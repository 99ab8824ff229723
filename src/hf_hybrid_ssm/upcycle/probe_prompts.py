"""Prompts that ask for what was said long before, made without data: from a tokenizer's own words, or from token ids.

With a tokenizer: sentences of random words of its vocabulary, among them facts ("The secret number of river is
48213."), more than a window of further sentences, and the question, in the chat template where there is one; the
answers follow, each with its number. Without one: keys, each followed by its value of a few tokens, all random and
different, a window of others, and the keys and values again, in another order.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LEAST_WORDS = 500
"""A vocabulary with fewer words of its own is asked for token ids."""
FACTS = 8
DIGITS = 5
VALUE_TOKENS = 3
FACT_SPACING = 5
"""Random words for each fact among the facts."""


@dataclass(frozen=True)
class RecallPrompt:
    """One prompt with its answers.

    Attributes:
        input_ids: (1, L).
        positions: of the tokens to recall, (N,); each follows its fact by more than the window.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor


def recall_prompts(
    tokenizer: Any | None, vocab_size: int, window: int, facts: int | None = None, count: int = 4, seed: int = 0
) -> list[RecallPrompt]:
    """Prompts whose answers lie more than a window before the question.

    Args:
        tokenizer: of transformers; None, or one with few words of its own: random token ids.
        vocab_size: token ids lie below it.
        window: tokens between a fact and its question, at least.
        facts: in each prompt, all of which are asked for; None: eight, or what a small vocabulary has tokens for.
        count: of prompts.

    Raises:
        ValueError: a number is not positive, or the vocabulary is too small for so many keys.
    """
    for name, value in (("window", window), ("facts", facts), ("count", count)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    words = [] if tokenizer is None else words_of(tokenizer)
    draw = random.Random(seed)
    if len(words) >= LEAST_WORDS:
        return [_in_words(tokenizer, words, window, facts or FACTS, draw) for _ in range(count)]
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    tokens = sorted(set(range(vocab_size)) - special)
    most = len(tokens) // (2 * (1 + VALUE_TOKENS))
    if (facts or 1) > most:
        raise ValueError(
            f"facts={facts or 1} must be at most {most}: keys and values, {1 + VALUE_TOKENS} tokens each, are half of "
            f"the vocabulary's {len(tokens)}, the others lie between."
        )
    facts = facts or min(FACTS, most)
    return [_in_tokens(tokens, window, facts, draw) for _ in range(count)]


def words_of(tokenizer: Any) -> list[str]:
    """The lower-case words of three to nine letters that are one token after a space, in alphabetical order."""
    special = set(tokenizer.all_special_ids)
    found = set()
    for token in sorted(tokenizer.get_vocab().values()):
        text = "" if token in special else tokenizer.decode([token])
        word = text.strip()
        if 3 <= len(word) <= 9 and word.isalpha() and word.islower():
            ids = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and tokenizer.decode(ids).strip() == word:
                found.add(word)
    return sorted(found)


def _in_words(tokenizer: Any, words: list[str], window: int, facts: int, draw: random.Random) -> RecallPrompt:
    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    values = {key: "".join(draw.choices("123456789", k=DIGITS)) for key in draw.sample(words, facts)}
    text = _sentences(words, FACT_SPACING * facts, draw)
    for key, value in values.items():
        text.insert(draw.randint(0, len(text)), f"The secret number of {key} is {value}.")
    beyond: list[str] = []
    while len(tokens(" ".join(beyond))) <= window:
        beyond += _sentences(words, max(8, window // 8), draw)
    asked = draw.sample(list(values), facts)
    question = f"What are the secret numbers of {', '.join(asked)}?"
    ids = _opening(tokenizer, f"{' '.join(text + beyond)}\n\n{question}", tokens)
    positions: list[int] = []
    for key in asked:
        ids += tokens(f"The secret number of {key} is")
        answer = tokens(f" {values[key]}")
        positions += range(len(ids), len(ids) + len(answer))
        ids += answer + tokens(".\n")
    return RecallPrompt(torch.tensor([ids]), torch.tensor(positions))


def _sentences(words: list[str], count: int, draw: random.Random) -> list[str]:
    """`count` words or a few more, in sentences."""
    made: list[str] = []
    while count > 0:
        length = draw.randint(5, 11)
        made.append(" ".join(draw.choices(words, k=length)).capitalize() + ".")
        count -= length
    return made


def _opening(tokenizer: Any, text: str, tokens: Callable[[str], list[int]]) -> list[int]:
    """What the answers follow: a user's message in the chat template, or the text after the tokenizer's own start."""
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": text}]
        return tokens(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return start + tokens(text + "\n\n")


def _in_tokens(tokens: list[int], window: int, facts: int, draw: random.Random) -> RecallPrompt:
    said = draw.sample(tokens, facts * (1 + VALUE_TOKENS))
    pairs = [said[start : start + 1 + VALUE_TOKENS] for start in range(0, len(said), 1 + VALUE_TOKENS)]
    others = sorted(set(tokens) - set(said))
    ids = [*said, *draw.choices(others, k=window)]
    positions: list[int] = []
    for pair in draw.sample(pairs, facts):
        positions += range(len(ids) + 1, len(ids) + len(pair))
        ids += pair
    return RecallPrompt(torch.tensor([ids]), torch.tensor(positions))
