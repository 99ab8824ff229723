"""Programs: what is done to a model and its cache, instruction by instruction, with explicit arguments.

A program is plain data: one that fails is printed as the lines of Python that make it again.
"""

from dataclasses import dataclass, field

Columns = list[int | None]


class Malformed(ValueError):
    """The program itself makes no sense: nothing is said about the model."""


class Step:
    """One instruction."""


@dataclass
class Feed(Step):
    """Read some columns of a batch.

    Args:
        rows: for each row of the batch a token id or None (padding) for each column.
        starts: for each row the columns whose token begins a new document.
        packing: how the documents are told to the model: "none", "seq_idx", "positions", "cu_seq_lens", or one of the
            latter with "+positions".
        mask: the attention mask: "none", of these columns ("current"), or of all columns so far ("full").
        inputs: "ids", "embeds", or embeddings with NaN at padded places ("nan").
        positions: whether position ids are given without packing.
        filler: token id at padded places.
    """

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

    count: int


@dataclass
class Reorder(Step):
    """`reorder_cache`: as many rows as before."""

    rows: list[int]


@dataclass
class Select(Step):
    """`batch_select_indices`: any number of rows."""

    rows: list[int]


@dataclass
class Repeat(Step):
    """`batch_repeat_interleave`."""

    times: int


@dataclass
class Reset(Step):
    """Forget everything."""


@dataclass
class Copy(Step):
    """Put a deep copy of the cache aside, as a further branch."""


@dataclass
class Switch(Step):
    """Go on with the branch that was put aside at `branch`, and put the present one there."""

    branch: int


@dataclass
class Compile(Step):
    """From here on the model is compiled by this backend of `torch.compile`."""

    backend: str


@dataclass
class Illegal(Step):
    """Something that must be refused by a clear error and change nothing; `kind` is a key of `machine.ILLEGAL`."""

    kind: str


@dataclass
class Program:
    """A model, a cache, and what is done to them.

    Args:
        variant: a key of `models.VARIANTS`.
        head: one of the variant's heads.
        dtype: "float32" or "float64", of the machine under test.
        cache: "dynamic", "implicit" (the model makes it), "static" or "none".
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
