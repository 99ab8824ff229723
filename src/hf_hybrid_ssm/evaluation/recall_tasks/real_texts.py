"""Texts of files (novels, dialogues, code) or of made sentences, with facts of several kinds among them, and the
questions, asked singly."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import torch

from hf_hybrid_ssm.evaluation.recall_tasks.filler import sentences
from hf_hybrid_ssm.evaluation.recall_tasks.kinds import HELD_OUT, KINDS
from hf_hybrid_ssm.evaluation.recall_tasks.questions import Question

FIELDS = ("text", "document", "dialogue")
PIECE = 400
"""Characters of a line from which on it is cut at the ends of its sentences."""
SPARE = 64
"""Tokens of text before the last fact, at least, where a text is made longer than it should be."""
INTRODUCTION = "Read the text and remember what it says.\n\n"


@dataclass(frozen=True)
class Asked:
    """A question about a text.

    Attributes:
        kind: of `KINDS`.
        ids: (1, N), what follows the tokens that all questions share, to the end of the answer.
        answer: (A,), the last of these tokens.
    """

    kind: str
    ids: torch.Tensor
    answer: torch.Tensor


@dataclass(frozen=True)
class RealText:
    """A text and what is asked about it.

    Attributes:
        shared: (1, L), the tokens before the questions.
        asked: each by itself.
    """

    shared: torch.Tensor
    asked: tuple[Asked, ...]


def real_texts(
    tokenizer: Any,
    files: Sequence[str | Path],
    length: int,
    count: int,
    window: int = 256,
    kinds: Sequence[str] = tuple(HELD_OUT),
    seed: int = 0,
    is_longer: bool = False,
) -> list[RealText]:
    """Texts of at most `length` tokens with question and answer, each with a fact of every kind.

    Files take turns. Every fact ends more than a window before the end of the question. A question follows the text in
    the chat template, where there is one, and the beginning of the reply is given.

    Args:
        files: JSON lines with a field text, document or dialogue, or plain text; none: made sentences.
        count: of texts; each is asked for every one of `kinds`.
        is_longer: where `length` is too short for window and facts, the text is longer.

    Raises:
        ValueError: a kind is not known, a file has too little text, or the length is too short for window and facts.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"kinds={unknown} are not among {', '.join(KINDS)}.")
    texts = []
    for index in range(count):
        draw = random.Random(f"{seed} {length} {index}")
        file, questions = files[index % len(files)] if files else None, distinct_questions(kinds, draw)
        room = length - max(_count(tokenizer, conversation(tokenizer, "", each)) for each in questions.values())
        if is_longer:
            of_facts = sum(_count(tokenizer, f"{fact}\n") + 1 for each in questions.values() for fact in each.facts)
            room = max(room, window + of_facts + SPARE)
        text = text_with_facts(tokenizer, file, room, window + 1, list(questions.values()), draw)
        texts.append(_asked(tokenizer, text, questions))
    return texts


def _asked(tokenizer: Any, text: str, questions: Mapping[str, Question]) -> RealText:
    rows = {}
    for kind, question in questions.items():
        before = conversation(tokenizer, text, question, with_answer=False)
        ids, start = _ids(tokenizer, f"{before} {question.answer}"), len(_ids(tokenizer, before))
        rows[kind] = ids, len(ids) - start
    nothing = _ids(tokenizer, conversation(tokenizer, text, Question((), "", "", ""), with_answer=False))
    every = [nothing, *(ids for ids, _ in rows.values())]
    differs = (place for place in range(len(nothing)) if len({ids[place] for ids in every}) > 1)
    shared = next(differs, len(nothing))
    asked = tuple(
        Asked(kind, torch.tensor([ids[shared:]]), torch.tensor(ids[len(ids) - answer :]))
        for kind, (ids, answer) in rows.items()
    )
    return RealText(torch.tensor([nothing[:shared]]), asked)


def distinct_questions(kinds: Sequence[str], draw: random.Random) -> dict[str, Question]:
    """A question of each kind, no two alike."""
    found: dict[str, Question] = {}
    while len(found) < len(kinds):
        kind = kinds[len(found)]
        question = KINDS[kind](draw)
        if question.question not in {other.question for other in found.values()}:
            found[kind] = question
    return found


def text_with_facts(
    tokenizer: Any, file: str | Path | None, room: int, after: int, questions: Sequence[Question], draw: random.Random
) -> str:
    """A stretch of a file (None: made sentences) with the facts at random places between its pieces.

    Args:
        room: tokens, with the facts.
        after: tokens at least that follow the last fact.

    Raises:
        ValueError: the room is too small, or the file is.
    """
    facts = [fact for question in questions for fact in question.facts]
    room -= sum(_count(tokenizer, f"{fact}\n") + 1 for fact in facts)
    if room <= after:
        raise ValueError(f"{room} tokens beside {len(facts)} facts are too few: {after + 1} are to follow them.")
    pieces, lengths = _stretch(tokenizer, file, room, draw)
    last = len(pieces)
    while last and sum(lengths[last:]) < after:
        last -= 1
    draw.shuffle(facts)
    for place, fact in sorted(((draw.randint(0, last), fact) for fact in facts), reverse=True):
        pieces.insert(place, fact + ("\n" if place and pieces[place - 1].endswith("\n") else " "))
    return "".join(pieces).strip()


def conversation(tokenizer: Any, text: str, question: Question, with_answer: bool = True) -> str:
    """The text, a question about it, and the beginning of the reply."""
    asked = f"{INTRODUCTION}{text}\n\n{question.question}"
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": asked}]
        asked = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    else:
        asked = f"{tokenizer.bos_token or ''}{asked}\n\n"
    return f"{asked}{question.prefix}" + (f" {question.answer}" if with_answer else "")


def _stretch(tokenizer: Any, file: str | Path | None, room: int, draw: random.Random) -> tuple[list[str], list[int]]:
    """Pieces of a file, from a random one on, or made sentences, and their tokens, which fill the room."""
    pieces, lengths = list[str](), list[int]()
    made = (f"{sentence} " for sentence in sentences(draw))
    for piece in made if file is None else _pieces_from(file, draw):
        length = _count(tokenizer, piece)
        if sum(lengths) + length > room:
            break
        pieces.append(piece)
        lengths.append(length)
    return pieces, lengths


def _pieces_from(file: str | Path, draw: random.Random) -> Iterator[str]:
    """Those of a file from a random one on, and from the first again, without end."""
    every = pieces_of(str(file))
    place = draw.randrange(len(every))
    return chain(every[place:], cycle(every))


@cache
def pieces_of(file: str) -> tuple[str, ...]:
    """The lines of a file's texts, long ones cut at the ends of their sentences; each ends in a space or a line's end.

    Raises:
        ValueError: the file has fewer than a hundred pieces, or no field that is known.
    """
    text = Path(file).read_text(encoding="utf-8")
    if file.endswith(".jsonl"):
        text = "\n".join(_field(json.loads(line), file) for line in text.splitlines() if line.strip())
    pieces = []
    for line in text.splitlines():
        parts = re.split(r"(?<=[.!?]) ", line) if len(line) > PIECE else [line]
        pieces += [f"{part} " for part in parts[:-1]] + [f"{parts[-1]}\n"]
    if len(pieces) < 100:
        raise ValueError(f"{file} has {len(pieces)} lines and sentences; 100 are needed.")
    return tuple(pieces)


def _field(row: Mapping[str, Any], file: str) -> str:
    for name in FIELDS:
        if isinstance(row.get(name), str):
            return row[name]
    raise ValueError(f"{file} has rows with {', '.join(row)}, and none of {', '.join(FIELDS)}.")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _count(tokenizer: Any, text: str) -> int:
    return len(_ids(tokenizer, text))
