"""Prompts that ask for what was said long before, made without data: of made sentences, or of token ids.

With a tokenizer: sentences of a small grammar, among them a fact ("The secret number of the river is 48213."), more
than a window of further sentences, and the question, in the chat template where there is one; the answer follows.
Without one: keys, each followed by its value of a few tokens, all random and different, many others, and the keys and
values again, in another order.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch

from hf_hybrid_ssm.evaluation.recall_tasks.filler import sentences

LEAST_WORDS = 500
"""A vocabulary with fewer words of its own is asked for token ids."""
WINDOWS = 8
"""Of a prompt. Layers that recall over one window need not over many."""
COUNT = 8
FACTS = 8
"""At most, of token ids; of sentences one, since a small model mixes up many."""
DIGITS = 5
FORMS = (
    ("The secret number of the {key} is {value}.", "What is the secret number of the {key}?"),
    ("The code of the {key} is {value}.", "What is the code of the {key}?"),
    ("The {key} has the number {value}.", "Which number does the {key} have?"),
    ("The password for the {key} is {value}.", "What is the password for the {key}?"),
)
"""Facts, and what asks for them. Prompts have them in turn: the layers of one wording are not taken for all."""
VALUE_TOKENS = 3
QUESTION = 64
"""Tokens of a prompt that are left for the chat template, the question and the answer."""


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
    facts: int | None = None,
    count: int = COUNT,
    seed: int = 0,
) -> list[RecallPrompt]:
    """Prompts whose answers lie more than a window before the question.

    Args:
        tokenizer: of transformers; None, or one with few words of its own: random token ids.
        vocab_size: token ids lie below it.
        window: tokens between a fact and its question, at least.
        windows: how many long a prompt is, about; sentences have their facts anywhere, token ids at the beginning.
        facts: in each prompt, all of which are asked for; None: one in sentences, and of token ids eight, or what a
            small vocabulary has tokens for.
        count: of prompts.

    Raises:
        ValueError: a number is not positive, or the vocabulary is too small for so many keys.
    """
    for name, value in (("window", window), ("windows", windows), ("facts", facts), ("count", count)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    words = [] if tokenizer is None else words_of(tokenizer)
    draw = random.Random(seed)
    if len(words) >= LEAST_WORDS:
        return [
            _in_sentences(tokenizer, words, FORMS[index % len(FORMS)], window, windows, facts or 1, draw)
            for index in range(count)
        ]
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    tokens = sorted(set(range(vocab_size)) - special)
    most = len(tokens) // (2 * (1 + VALUE_TOKENS))
    if (facts or 1) > most:
        raise ValueError(
            f"facts={facts or 1} must be at most {most}: keys and values, {1 + VALUE_TOKENS} tokens each, are half of "
            f"the vocabulary's {len(tokens)}, the others lie between."
        )
    facts = facts or min(FACTS, most)
    return [_in_tokens(tokens, max(1, windows - 1) * window, facts, draw) for _ in range(count)]


def made_text(tokenizer: Any | None, length: int, seed: int = 0) -> torch.Tensor | None:
    """Sentences of the small grammar, in the chat template where there is one: (1, length); None without a tokenizer
    that has words."""
    if tokenizer is None or len(words_of(tokenizer)) < LEAST_WORDS:
        return None
    filler, text = sentences(random.Random(seed)), ""
    ids: list[int] = []
    while len(ids) < length:
        text = " ".join([text, *(next(filler) for _ in range(length // 8))]).strip()
        ids = tokenizer(_opening(tokenizer, text), add_special_tokens=False)["input_ids"]
    return torch.tensor([ids[:length]])


def words_of(tokenizer: Any) -> list[str]:
    """The lower-case words of three to nine letters that are one token after a space, in alphabetical order."""
    special = set(tokenizer.all_special_ids)
    words = set()
    for token in sorted(tokenizer.get_vocab().values()):
        text = "" if token in special else tokenizer.decode([token])
        word = text.strip()
        if 3 <= len(word) <= 9 and word.isalpha() and word.islower():
            ids = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and tokenizer.decode(ids).strip() == word:
                words.add(word)
    return sorted(words)


def _in_sentences(
    tokenizer: Any,
    words: list[str],
    form: tuple[str, str],
    window: int,
    windows: int,
    facts: int,
    draw: random.Random,
) -> RecallPrompt:
    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def filling(length: int) -> list[str]:
        """Sentences of at least so many tokens."""
        chosen: list[str] = []
        while length > 0:
            chosen.append(next(filler))
            length -= len(tokens(f" {chosen[-1]}"))
        return chosen

    filler = sentences(draw)
    values = {key: "".join(draw.choices("123456789", k=DIGITS)) for key in draw.sample(words, facts)}
    text = filling((windows - 2) * window - QUESTION)
    for key, value in values.items():
        text.insert(draw.randint(0, len(text)), form[0].format(key=key, value=value))
    asked = draw.sample(list(values), facts)
    question = " ".join(form[1].format(key=key) for key in asked)
    opening = _opening(tokenizer, f"{' '.join(text + filling(window + 1))}\n\n{question}")
    ids = tokens(opening)
    start = len(tokens(opening[: opening.rindex(question)])) - 1  # its first letters may have joined the token before
    positions: list[int] = []
    for key in asked:
        ids += tokens(form[0].format(key=key, value="").removesuffix(" ."))
        answer = tokens(f" {values[key]}")
        positions += range(len(ids), len(ids) + len(answer))
        ids += answer + tokens(".\n")
    return RecallPrompt(torch.tensor([ids]), torch.tensor(positions), start)


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
