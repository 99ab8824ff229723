"""Run one program: the machine and its specification in step, compared after every feed."""

import copy
import math
from dataclasses import dataclass

import torch

from tests.programs.machine import Machine
from tests.programs.oracle import Oracle
from tests.programs.program import Feed, Illegal, Malformed, Program
from tests.programs.specification import Question, Row, Specification

# of a deviation relative to the largest value that the model should have said of the token
TOLERANCE = {"float32": 3e-5, "float64": 1e-11}


@dataclass
class Outcome:
    """What came of a program.

    Args:
        failure: None, or what went wrong, beginning with its kind: "deviation", "not finite", "error" or "refusal".
        step: the step it went wrong at, or the last one.
        deviation: the largest relative deviation.
        tokens: outputs compared.
    """

    failure: str | None = None
    step: int | None = None
    deviation: float = 0.0
    tokens: int = 0

    @property
    def kind(self) -> str | None:
        return None if self.failure is None else self.failure.split(":")[0]


def run(program: Program) -> Outcome:
    """What came of a program; it stops at the first failure.

    Raises:
        Malformed: the program makes no sense.
    """
    oracle, outcome = Oracle(program), Outcome()
    oracle.prepare(_all_questions(program))
    machine, specification = Machine(program), Specification(program)
    for index, step in enumerate(program.steps):
        outcome.step = index
        before = copy.copy(specification.state)
        try:
            if isinstance(step, Feed):
                if program.cache == "none":
                    before.rows = [Row(source=row.source) for row in before.rows]
                questions = specification.feed(step)
                failure = _compare(machine.feed(step, before), questions, oracle, program, outcome)
            elif isinstance(step, Illegal):
                specification.apply(step)
                failure = machine.refuse(step, before)
                failure = failure and f"refusal: {failure}"
            else:
                specification.apply(step)
                machine.apply(step)
                failure = None
        except Malformed:
            raise
        except Exception as error:
            failure = f"error: {type(error).__name__}: {error}"
        if failure is not None:
            outcome.failure = failure
            return outcome
    return outcome


def _all_questions(program: Program) -> list[Question]:
    specification, questions = Specification(program), []
    for step in program.steps:
        if isinstance(step, Feed):
            questions += specification.feed(step)
        else:
            specification.apply(step)
    return questions


def _compare(
    outputs: torch.Tensor, questions: list[Question], oracle: Oracle, program: Program, outcome: Outcome
) -> str | None:
    """What is wrong with the outputs of a feed."""
    if not questions:
        return None
    expected = torch.stack([oracle.answer(question) for question in questions])
    is_sequence = program.head == "sequence"
    columns = [0 if is_sequence else question.column for question in questions]
    actual = outputs[[question.row for question in questions], columns].double()
    if actual.shape != expected.shape:
        return f"error: outputs of shape {tuple(outputs.shape)}"
    errors = (actual - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=1)
    worst = int(errors.nan_to_num(nan=math.inf).argmax())
    deviation, question = float(errors[worst]), questions[worst]
    outcome.tokens += len(questions)
    place = f"row {question.row}, column {question.column}"
    if not math.isfinite(deviation):
        return f"not finite: {place}"
    outcome.deviation = max(outcome.deviation, deviation)
    if deviation > TOLERANCE[program.dtype]:
        return f"deviation: {deviation:.1e} at {place}, token {question.index} of its document"
    return None
