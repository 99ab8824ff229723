"""Programs: what is done to a model and its cache, instruction by instruction, with explicit arguments.

A program is plain data, so that one that fails can be printed as a line of JSON and run again from it.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

PACKINGS = ("none", "seq_idx", "seq_idx+positions", "positions", "cu_seq_lens", "cu_seq_lens+positions")
MASKS = ("none", "current", "full")
INPUTS = ("ids", "embeds", "nan")
CACHES = ("dynamic", "implicit", "static", "none")

Columns = list[int | None]


class Malformed(ValueError):
    """The program itself makes no sense: nothing is said about the model."""


@dataclass
class Step:
    """One instruction; `op` is its name in JSON."""

    op: ClassVar[str]


@dataclass
class Feed(Step):
    """Read some columns of a batch.

    Args:
        rows: for each row of the batch a token id or None (padding) for each column.
        starts: for each row the columns whose token begins a new document.
        packing: how the documents are told to the model, one of `PACKINGS`.
        mask: the attention mask, one of `MASKS`: none, of these columns, or of all columns so far.
        inputs: one of `INPUTS`; "nan" are embeddings with NaN at padded places.
        positions: whether position ids are given without packing.
        filler: token id at padded places.
    """

    op = "feed"
    rows: list[Columns]
    starts: list[list[int]]
    packing: str = "none"
    mask: str = "none"
    inputs: str = "ids"
    positions: bool = False
    filler: int = 0

    @property
    def length(self) -> int:
        return len(self.rows[0])

    @property
    def is_padded(self) -> bool:
        return any(token is None for row in self.rows for token in row)

    @property
    def gives_positions(self) -> bool:
        return self.positions or "positions" in self.packing


@dataclass
class Crop(Step):
    """Forget the last columns."""

    op = "crop"
    count: int


@dataclass
class Reorder(Step):
    """`reorder_cache`: as many rows as before."""

    op = "reorder"
    rows: list[int]


@dataclass
class Select(Step):
    """`batch_select_indices`: any number of rows."""

    op = "select"
    rows: list[int]


@dataclass
class Repeat(Step):
    """`batch_repeat_interleave`."""

    op = "repeat"
    times: int


@dataclass
class Reset(Step):
    op = "reset"


@dataclass
class Copy(Step):
    """Put a deep copy of the cache aside, as a further branch."""

    op = "deepcopy"


@dataclass
class Switch(Step):
    """Go on with the branch that was put aside at `branch`, and put the present one there."""

    op = "switch"
    branch: int


@dataclass
class Compile(Step):
    """From here on the model is compiled by this backend of `torch.compile`."""

    op = "compile"
    backend: str


@dataclass
class Illegal(Step):
    """Something that must be refused by a clear error and change nothing; `kind` is a key of `machine.ILLEGAL`."""

    op = "illegal"
    kind: str


STEPS: dict[str, type[Step]] = {
    step.op: step for step in (Feed, Crop, Reorder, Select, Repeat, Reset, Copy, Switch, Compile, Illegal)
}


@dataclass
class Program:
    """A model, a cache, and what is done to them.

    Args:
        variant: a key of `models.VARIANTS`.
        head: one of the variant's heads.
        dtype: "float32" or "float64", of the machine under test.
        cache: one of `CACHES`.
        record: whether the cache records its past, so that it can go back.
        sources: what the encoder reads, for each row of the first batch; empty without an encoder.
        source_side: where the sources are padded.
        steps: the instructions.
    """

    variant: str
    head: str
    dtype: str = "float32"
    cache: str = "dynamic"
    record: bool = False
    sources: list[list[int]] = field(default_factory=list)
    source_side: str = "right"
    steps: list[Step] = field(default_factory=list)

    def dumps(self) -> str:
        content: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "steps"}
        content["steps"] = [{"op": step.op, **asdict(step)} for step in self.steps]
        return json.dumps(content)

    @classmethod
    def loads(cls, text: str) -> "Program":
        content = json.loads(text)
        steps = [STEPS[step.pop("op")](**step) for step in content.pop("steps")]
        return cls(**content, steps=steps)

    @property
    def instructions(self) -> set[str]:
        return {step.op for step in self.steps}
