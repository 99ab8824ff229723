"""Facts of many kinds, each with a question and its answer; some of the kinds are never chosen or trained by."""

import random
from collections.abc import Callable

from hf_hybrid_ssm.evaluation.recall_tasks.questions import Question
from hf_hybrid_ssm.evaluation.recall_tasks.words import ADJECTIVES, NAMES, THINGS, TRADES

COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "brown", "pink", "grey", "white", "black", "silver")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
TOWNS = (
    "Amberley", "Brackwater", "Caldmoor", "Dunsford", "Eastwick", "Fernhill", "Greycliff", "Harwood", "Ironbridge",
    "Kingsport", "Larkfield", "Millbrook", "Northgate", "Oakhurst", "Pinewood", "Redhill", "Silverton", "Thornbury",
    "Westford", "Yarrow",
)  # fmt: skip
ROOMS = ("kitchen", "cellar", "attic", "library", "hall", "nursery", "pantry", "study", "garage", "bedroom")
PLACES = ("behind the clock", "under the stairs", "beside the stove", "on the top shelf", "in the blue chest",
          "below the window", "inside the piano", "near the back door")  # fmt: skip
ANIMALS = ("goat", "parrot", "donkey", "rabbit", "spaniel", "tortoise", "pony", "canary", "hedgehog", "ferret")
LAST_NAMES = (
    "Ashdown", "Barlow", "Crane", "Draper", "Ellwood", "Fairfax", "Granger", "Holloway", "Iverson", "Kendrick",
    "Lockwood", "Marlowe", "Norwood", "Prescott", "Radley", "Sinclair", "Thatcher", "Underhill", "Whitaker", "Yardley",
)  # fmt: skip
OFFICES = ("mayor", "postmaster", "headmistress", "sheriff", "librarian", "station master", "vicar", "treasurer")
CONSTANTS = ("LIMIT", "TIMEOUT", "OFFSET", "BUDGET", "DEPTH", "STRIDE", "QUOTA", "RETRIES")
OWNERS = ("QUEUE", "BUFFER", "CACHE", "SOCKET", "TIMER", "PARSER", "WORKER", "SENSOR")


def _colour(draw: random.Random) -> Question:
    name, colour = draw.choice(NAMES), draw.choice(COLOURS)
    fact = f"{name} painted the front door {colour}."
    return Question((fact,), f"What colour did {name} paint the front door?", fact[: -len(colour) - 2], colour)


def _phone(draw: random.Random) -> Question:
    name, number = draw.choice(NAMES), f"{draw.randint(200, 999)}-{draw.randint(1000, 9999)}"
    fact = f"The phone number of {name} is {number}."
    return Question((fact,), f"What is the phone number of {name}?", f"The phone number of {name} is", number)


def _product(draw: random.Random) -> Question:
    name, product = draw.choice(NAMES), f"{draw.choice(ADJECTIVES)} {draw.choice(THINGS)}"
    question = f"What did {name} order from the catalogue?"
    return Question((f"{name} ordered the {product} from the catalogue.",), question, f"{name} ordered the", product)


def _words(draw: random.Random) -> Question:
    town, words = draw.choice(TOWNS), " ".join(draw.sample(THINGS, 3))
    fact = f"The pass phrase of the club in {town} is {words}."
    question = f"What is the pass phrase of the club in {town}?"
    return Question((fact,), question, f"The pass phrase of the club in {town} is", words)


def _price(draw: random.Random) -> Question:
    thing, price = draw.choice(THINGS), f"{draw.randint(11, 99)} dollars and {draw.randint(11, 99)} cents"
    question = f"How much did the {thing} in the shop window cost?"
    return Question((f"The {thing} in the shop window cost {price}.",), question, f"The {thing} cost", price)


def _trade(draw: random.Random) -> Question:
    name, trade = draw.choice(NAMES), f"{draw.choice(TRADES)} in {draw.choice(TOWNS)}"
    return Question((f"{name} worked as a {trade}.",), f"What did {name} work as?", f"{name} worked as a", trade)


def _time(draw: random.Random) -> Question:
    town, time = draw.choice(TOWNS), f"{draw.randint(1, 12)}:{draw.randint(10, 59)}"
    question = f"When does the ferry to {town} leave?"
    return Question((f"The ferry to {town} leaves at {time}.",), question, f"The ferry to {town} leaves at", time)


def _date(draw: random.Random) -> Question:
    name = draw.choice(NAMES)
    date = f"{draw.randint(1, 28)} {draw.choice(MONTHS)} {draw.randint(1700, 1999)}"
    return Question((f"{name} was born on {date}.",), f"When was {name} born?", f"{name} was born on", date)


def _label(draw: random.Random) -> Question:
    thing, letters = draw.choice(THINGS), "".join(draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=2))
    label = f"{letters}-{draw.randint(100, 999)}-{draw.choice('ABCDEFGHJKLMNPQRSTUVWXYZ')}"
    question = f"What does the label on the {thing} say?"
    return Question((f"The label on the {thing} says {label}.",), question, f"The label on the {thing} says", label)


def _place(draw: random.Random) -> Question:
    thing, place = draw.choice(THINGS), f"{draw.choice(ROOMS)}, {draw.choice(PLACES)}"
    question = f"Where is the {thing} kept?"
    return Question((f"The {thing} is kept in the {place}.",), question, f"The {thing} is kept in the", place)


def _name(draw: random.Random) -> Question:
    office, name = f"{draw.choice(OFFICES)} of {draw.choice(TOWNS)}", f"{draw.choice(NAMES)} {draw.choice(LAST_NAMES)}"
    prefix = f"The {office} was called"
    return Question((f"{prefix} {name}.",), f"What was the {office} called?", prefix, name)


def _two(draw: random.Random) -> Question:
    name, both = draw.choice(NAMES), f"{draw.choice(ANIMALS)} and grew up in {draw.choice(TOWNS)}"
    question = f"Which animal does {name} keep, and where did {name} grow up?"
    return Question((f"{name} keeps a {both}.",), question, f"{name} keeps a", both)


def _constant(draw: random.Random) -> Question:
    name, value = f"{draw.choice(OWNERS)}_{draw.choice(CONSTANTS)}", str(draw.randint(1000, 99999))
    question = f"What is the value of {name} in the code?"
    return Question((f"#define {name} {value}",), question, f"The value of {name} is", value)


HELD_IN: dict[str, Callable[[random.Random], Question]] = {
    "colour": _colour,
    "phone number": _phone,
    "product": _product,
    "words": _words,
    "price": _price,
    "trade": _trade,
    "time": _time,
}
"""What students may be chosen and trained by."""
HELD_OUT: dict[str, Callable[[random.Random], Question]] = {
    "date": _date,
    "label": _label,
    "place": _place,
    "name": _name,
    "two facts": _two,
    "constant": _constant,
}
"""What they are judged by."""
KINDS = HELD_IN | HELD_OUT
