"""What recall tasks ask: facts to be hidden in a text, a question, and its answer."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from hf_hybrid_ssm.evaluation.recall_tasks.words import NAMES, THINGS, TRADES

SEVERAL, DISTRACTORS, PAIRS, CHAINS = 4, 8, 8, 2


@dataclass(frozen=True)
class Question:
    """Attributes:
    facts: sentences, which keep their order in the text.
    question: the last sentence of the prompt.
    prefix: how the reply begins.
    answer: what has to come next, all of it.
    """

    facts: tuple[str, ...]
    question: str
    prefix: str
    answer: str


def needle(draw: random.Random) -> Question:
    """One number in the text."""
    return _number_of_one(1, draw)


def distractors(draw: random.Random) -> Question:
    """One of eight numbers, each of another name."""
    return _number_of_one(DISTRACTORS, draw)


def several(draw: random.Random) -> Question:
    """Four numbers, all asked for, in another order."""
    numbers = _numbers(SEVERAL, draw)
    asked = draw.sample(list(numbers), SEVERAL)
    listed = ", ".join(f"{name}: {numbers[name]}" for name in asked)
    question = f"What are the magic numbers of {', '.join(asked[:-1])} and {asked[-1]}?"
    return Question(_facts(numbers), question, f"{asked[0]}:", listed.removeprefix(f"{asked[0]}: "))


def variables(draw: random.Random) -> Question:
    """The last of three names of which each has the number of the one before; another such chain beside it."""
    names = draw.sample(NAMES, 3 * CHAINS)
    chains = [names[3 * index : 3 * index + 3] for index in range(CHAINS)]
    numbers = [_number(draw) for _ in chains]
    steps = [f"{chain[0]} has the number {number}." for chain, number in zip(chains, numbers, strict=True)]
    for place in (1, 2):
        steps += [f"{chain[place]} has the same number as {chain[place - 1]}." for chain in chains]
    last = chains[0][2]
    return Question(tuple(steps), f"What number does {last} have?", f"{last} has the number", numbers[0])


def pairs(draw: random.Random) -> Question:
    """What one of eight people was looking for."""
    names, things = draw.sample(NAMES, PAIRS), draw.sample(THINGS, PAIRS)
    facts = [
        f"{name} the {draw.choice(TRADES)} was looking for the {thing}."
        for name, thing in zip(names, things, strict=True)
    ]
    asked = draw.randrange(PAIRS)
    name = names[asked]
    return Question(tuple(facts), f"What was {name} looking for?", f"{name} was looking for the", things[asked])


QUESTIONS: dict[str, Callable[[random.Random], Question]] = {
    "needle": needle,
    "several": several,
    "distractors": distractors,
    "variables": variables,
    "pairs": pairs,
}


def _number_of_one(count: int, draw: random.Random) -> Question:
    numbers = _numbers(count, draw)
    asked = draw.choice(list(numbers))
    prefix = f"The magic number of {asked} is"
    return Question(_facts(numbers), f"What is the magic number of {asked}?", prefix, numbers[asked])


def _numbers(count: int, draw: random.Random) -> dict[str, str]:
    return {name: _number(draw) for name in draw.sample(NAMES, count)}


def _number(draw: random.Random) -> str:
    return str(draw.randint(10_000, 99_999))


def _facts(numbers: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"The magic number of {name} is {number}." for name, number in numbers.items())
