"""What a program means, on Python lists alone: which tokens each row has read, and which prefix explains each output.

Nothing here knows of tensors, caches or states.
"""

import copy
from dataclasses import dataclass, field, replace

from tests.programs.models import VARIANTS
from tests.programs.program import (
    Compile,
    Copy,
    Crop,
    Feed,
    Illegal,
    Malformed,
    Program,
    Reorder,
    Repeat,
    Reset,
    Select,
    Step,
    Switch,
)

Document = tuple[int, ...]
Source = tuple[int, ...]
STATIC_SIZE = 64


@dataclass(frozen=True)
class Question:
    """An output of the machine, and what it has to be.

    Args:
        row, column: its place in the feed.
        document: the tokens that may have an influence: the token's document up to itself, all of it where a token
            sees the future.
        index: which token of the document it is.
        source: what the row's encoder reads.
    """

    row: int
    column: int
    document: Document
    index: int
    source: Source = ()


@dataclass(frozen=True)
class Row:
    """What one row of the cache has read.

    A column is padding (None) or (number of the document, token, whether the model has been told that number).
    """

    columns: tuple[tuple[int, int, bool] | None, ...] = ()
    source: Source = ()

    @property
    def document_number(self) -> int:
        return next((column[0] for column in reversed(self.columns) if column is not None), 0)

    @property
    def knows_number(self) -> bool:
        """Whether the number of the last document has been told."""
        return any(column[2] for column in self.columns if column is not None and column[0] == self.document_number)

    @property
    def is_empty(self) -> bool:
        return all(column is None for column in self.columns)

    def document(self, number: int) -> Document:
        return tuple(column[1] for column in self.columns if column is not None and column[0] == number)

    def read(self, tokens: list[int | None], starts: list[int], tells_numbers: bool = False) -> "Row":
        number, empty, new = self.document_number, self.is_empty, []
        for column, token in enumerate(tokens):
            if token is None:
                if column in starts:
                    raise Malformed(f"padding at column {column} cannot begin a document")
                new.append(None)
                continue
            number += column in starts and not empty
            empty = False
            new.append((number, token, tells_numbers))
        return replace(self, columns=self.columns + tuple(new))


@dataclass
class State:
    """One branch.

    Args:
        rows: what they have read.
        undoable: how many columns can be undone; None: nothing is recorded.
        was_packed, was_padded: some row has had documents, padding, even if it was undone or dropped.
    """

    rows: list[Row]
    undoable: int | None = None
    was_packed: bool = False
    was_padded: bool = False

    @property
    def num_columns(self) -> int:
        return len(self.rows[0].columns) if self.rows else 0


@dataclass
class Specification:
    """The interpreter of a program on lists; `feed` gives the questions, `apply` does every other instruction.

    Args:
        program: its header is read, not its steps.

    Raises:
        Malformed: by every method, for a step that makes no sense here.
    """

    program: Program
    state: State = field(init=False)
    branches: list[State] = field(default_factory=list)
    is_compiled: bool = False

    def __post_init__(self) -> None:
        self.variant = VARIANTS[self.program.variant]
        rows = [Row(source=tuple(source)) for source in self.program.sources]
        self.state = State(rows, 0 if self.program.record else None)

    def clone(self) -> "Specification":
        """A copy that goes its own way; rows never change, and are shared."""
        clone = copy.copy(self)
        clone.state, clone.branches = copy.copy(self.state), [copy.copy(branch) for branch in self.branches]
        return clone

    def feed(self, step: Feed) -> list[Question]:
        """Read the columns; the questions are about every real token of this feed."""
        if self.program.cache == "none":
            self.state.rows = [Row(source=row.source) for row in self.state.rows]
        self.check_feed(step)
        if not self.state.rows:
            self.state.rows = [Row() for _ in step.rows]
        before = self.state.num_columns
        told = step.packing.startswith("seq_idx")
        self.state.rows = [row.read(*new, told) for row, *new in self._zip(step)]
        self.state.was_packed |= any(row.document_number for row in self.state.rows)
        self.state.was_padded |= step.is_padded
        if self.state.undoable is not None:
            self.state.undoable += step.length
        questions = []
        for index, row in enumerate(self.state.rows):
            asked = [
                self._question(index, row, before, column)
                for column in range(step.length)
                if row.columns[before + column] is not None
            ]
            if self.program.head == "sequence":
                asked = asked[-1:]
            questions += asked
        return questions

    def _question(self, index: int, row: Row, before: int, column: int) -> Question:
        number = row.columns[before + column][0]
        upto = replace(row, columns=row.columns[: before + column + 1]).document(number)
        document = upto if self.variant.is_causal else row.document(number)
        return Question(index, column, document, len(upto) - 1, row.source)

    def check_feed(self, step: Feed) -> None:
        """Raise Malformed where nobody could say what the feed means."""
        rows, program = self.state.rows, self.program
        if (rows and len(rows) != len(step.rows)) or len(step.starts) != len(step.rows):
            raise Malformed("another batch")
        if self.state.num_columns + step.length > STATIC_SIZE:
            raise Malformed("too long")
        if step.mask == "none" and step.is_padded:
            raise Malformed("padding without a mask")
        if all(token is None for row in step.rows for token in row):
            raise Malformed("nothing but padding")
        new_documents = [row.read(tokens, starts) for row, tokens, starts in self._zip(step)]
        has_documents = any(row.document_number for row in new_documents)
        if has_documents and (self.variant.has_encoder or (program.head == "sequence" and not self.variant.is_causal)):
            raise Malformed("documents have no meaning here")
        if any(step.starts) and step.packing == "none":
            raise Malformed("documents that nobody is told")
        if step.packing not in ("none", "seq_idx", "seq_idx+positions") and step.mask != "none":
            raise Malformed("positions tell documents only where there is no mask")
        if step.packing.startswith("cu_seq_lens") and len(step.rows) > 1:
            raise Malformed("cu_seq_lens are of one row")
        if step.packing == "cu_seq_lens" and self.state.num_columns:
            raise Malformed("cu_seq_lens alone are of a row that is read at once")
        if self.variant.has_encoder and (step.packing != "none" or step.positions):
            raise Malformed("an encoder-decoder takes neither documents nor positions")
        if not self.variant.is_causal and (step.positions or step.packing == "seq_idx+positions"):
            raise Malformed("a model that sees the future has no use for positions")
        if not self.variant.is_causal and self.state.num_columns:
            raise Malformed("a model that sees the future reads once")
        if any(self._is_untold(step, *row) for row in self._zip(step)):
            raise Malformed("whether the first token goes on with a document that had no number")
        if not self.variant.has_states and self.state.num_columns:
            self._check_without_states(step)

    def _check_without_states(self, step: Feed) -> None:
        """Keys and values alone do not tell where documents began and what was padding."""
        if self.state.was_packed or any(step.starts):
            raise Malformed("documents over several pieces need states")
        if self.state.was_padded and step.mask != "full":
            raise Malformed("padding over several pieces needs states, or a mask of all columns")

    @staticmethod
    def _is_untold(step: Feed, row: Row, tokens: list[int | None], starts: list[int]) -> bool:
        """A document begins with the first token: its number has to differ from one told before, or its position is 0
        (which counts where there is no mask).
        """
        first = next((column for column, token in enumerate(tokens) if token is not None), None)
        if first not in starts or row.is_empty or row.knows_number:
            return False
        return not step.gives_positions or step.mask != "none"

    def _zip(self, step: Feed):
        rows = self.state.rows or [Row() for _ in step.rows]
        return zip(rows, step.rows, step.starts)

    def apply(self, step: Step) -> None:
        """Every instruction but `Feed`."""
        state, program_cache = self.state, self.program.cache
        if isinstance(step, Crop):
            if state.undoable is None or not 0 < step.count <= state.undoable:
                raise Malformed("it cannot go back so far")
            state.rows = [replace(row, columns=row.columns[: -step.count]) for row in state.rows]
            state.undoable = 0
        elif isinstance(step, Reorder | Select | Repeat):
            self._move_rows(step)
        elif isinstance(step, Reset):
            if program_cache not in ("dynamic", "static"):
                raise Malformed("there is no cache to reset")
            state.rows = [Row(source=row.source) for row in state.rows]
            state.was_packed = state.was_padded = False
            state.undoable = None if state.undoable is None else 0
        elif isinstance(step, Copy):
            self.branches.append(replace(state, rows=list(state.rows)))
        elif isinstance(step, Switch):
            self.state, self.branches[step.branch] = self.branches[step.branch], state
        elif isinstance(step, Compile):
            self.is_compiled = True
        elif isinstance(step, Illegal) and (self.is_compiled or program_cache == "none" or state.num_columns == 0):
            raise Malformed("values are checked outside of a compiled model, against a cache with tokens")
        elif isinstance(step, Illegal) and step.kind.startswith("past") and not self._may_contradict(step.kind):
            raise Malformed("there is no past that a mask could contradict")

    def _may_contradict(self, kind: str) -> bool:
        """Whether a state remembers the past, and the past has what is to be called something else."""
        wanted = {"past text as padding": {False}, "past padding as text": {True}}.get(kind, {True, False})
        found = [{column is None for column in row.columns} for row in self.state.rows]
        return self.variant.has_states and any(wanted <= kinds for kinds in found)

    def _move_rows(self, step: Reorder | Select | Repeat) -> None:
        state, program, batch = self.state, self.program, len(self.state.rows)
        if program.cache == "none" or state.num_columns == 0:
            raise Malformed("there is nothing to move")
        if program.cache == "static" and not isinstance(step, Reorder):
            raise Malformed("a static cache keeps its batch")
        if isinstance(step, Repeat):
            rows = [index for index in range(batch) for _ in range(step.times)]
        else:
            rows = step.rows
        state.rows = [state.rows[index] for index in rows]
        state.undoable = None if state.undoable is None else 0
