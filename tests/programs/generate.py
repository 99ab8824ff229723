"""Draw a program from a seed."""

from random import Random

from tests.programs.machine import ILLEGAL
from tests.programs.models import VARIANTS, VOCABULARY
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
from tests.programs.specification import Specification

MAX_COLUMNS, MAX_ROWS = 30, 6
FIRST_TOKEN = 3  # the ids below have a meaning to some head: padding, begin, end
COMPILED = 1 / 300  # of all programs: compiling takes longer than a hundred of the others


def generate(seed: int, variant: str | None = None, compiled: bool | None = None) -> Program:
    """The program of a seed; the same one on every machine."""
    return _Generator(Random(seed), variant, compiled).program


class _Generator:
    def __init__(self, random: Random, name: str | None, compiled: bool | None):
        self.random = random
        name = random.choice(list(VARIANTS)) if name is None else name
        self.variant = VARIANTS[name]
        head = random.choice(self.variant.heads)
        self.program = Program(name, head, dtype=random.choice(["float32", "float64"]), cache=self._cache(head))
        self.program.record = self.program.cache == "dynamic" and random.random() < 0.6
        self.batch = random.choice([1, 1, 2, 2, 3, 4])
        if self.variant.has_encoder:
            self.program.sources = [self._tokens(random.randint(1, 8)) for _ in range(self.batch)]
            self.program.source_side = random.choice(["left", "right"])
        self.packs = random.random() < 0.5 and not self.variant.has_encoder
        self.packs = self.packs and (self.variant.is_causal or head != "sequence")
        self.compiled = random.random() < COMPILED if compiled is None else compiled
        self.specification = Specification(self.program)
        self._draw()

    def _cache(self, head: str) -> str:
        if not self.variant.is_causal:
            return "none"
        weights = {"dynamic": 14, "static": 3, "none": 2, "implicit": 2 if head not in ("token", "span") else 0}
        return self.random.choices(list(weights), list(weights.values()))[0]

    def _draw(self) -> None:
        if self.compiled:
            self._try(Compile(self.random.choice(["eager", "aot_eager"])))
        self._try_feed()
        steps = 1 if self.program.cache == "none" else 2 if self.compiled else 9
        for _ in range(self.random.randint(0, steps)):
            self._try_feed() if self.random.random() < 0.55 else self._try(self._other())
        self._try_feed()
        for branch in range(len(self.specification.branches)):
            if self.random.random() < 0.6:
                self._try(Switch(branch))
                self._try_feed()

    def _try(self, step: Step | None) -> bool:
        """Append a step that makes sense here."""
        if step is None:
            return False
        before = self.specification.clone()
        try:
            if isinstance(step, Feed):
                self.specification.feed(step)
            else:
                self.specification.apply(step)
        except Malformed:
            self.specification = before
            return False
        self.program.steps.append(step)
        return True

    def _try_feed(self) -> None:
        for _ in range(8):
            if self._try(self._feed()):
                return

    def _other(self) -> Step | None:
        random, state, branches = self.random, self.specification.state, self.specification.branches
        rows = len(state.rows)
        op = random.choice(["crop", "crop", "reorder", "select", "repeat", "reset", "deepcopy", "switch", "illegal"])
        match op:
            case "crop":
                return Crop(random.randint(1, state.undoable)) if state.undoable else None
            case "reorder":
                return Reorder([random.randrange(rows) for _ in range(rows)])
            case "select":
                return Select([random.randrange(rows) for _ in range(random.randint(1, min(rows + 1, MAX_ROWS)))])
            case "repeat":
                times = random.randint(1, 3)
                return Repeat(times) if times * rows <= MAX_ROWS else None
            case "reset":
                return Reset() if random.random() < 0.5 else None
            case "deepcopy":
                return Copy() if len(branches) < 2 else None
            case "switch":
                return Switch(random.randrange(len(branches))) if branches else None
            case "illegal":
                return self._illegal()

    def _illegal(self) -> Step | None:
        kind = self.random.choice(list(ILLEGAL))
        if self.variant.has_encoder and kind.split()[0] in ("seq_idx", "position_ids"):
            return None
        if "crop" in kind and self.variant.has_full_attention:
            return None  # transformers' own layer of keys goes back before a later layer refuses
        return Illegal(kind)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]

    def _feed(self) -> Feed | None:
        random, state = self.random, self.specification.state
        batch = len(state.rows) or self.batch
        columns = 0 if self.program.cache == "none" else state.num_columns
        room = MAX_COLUMNS - columns
        if room <= 0:
            return None
        whole = self.program.cache == "none" or (self.variant.has_encoder and columns == 0)
        length = min(room, random.choice([1, 1, 1, 2, 3, 4, 5, 8, 12] if not whole else [1, 3, 6, 9, 14, 20]))
        packing = self._packing(batch)
        by_positions = packing not in ("none", "seq_idx", "seq_idx+positions")
        padded = not by_positions and random.random() < 0.45
        rows = self._rows(batch, length, padded)
        starts: list[list[int]] = [[] for _ in rows]
        if packing != "none":
            chance = random.choice([0.0, 0.15, 0.4])
            starts = [
                [c for c, token in enumerate(row) if token is not None and random.random() < chance] for row in rows
            ]
        mask = "none"
        if padded or (not by_positions and random.random() < 0.35):
            mask = random.choice(["current", "full", "full"])
        inputs = random.choice(["ids", "ids", "embeds", "nan"])
        positions = packing == "none" and random.random() < 0.2
        positions = positions and not self.variant.has_encoder and self.variant.is_causal
        filler = random.choice([0, 0, 1, random.randrange(VOCABULARY)])
        return Feed(rows, starts, packing, mask, inputs, positions, filler)

    def _packing(self, batch: int) -> str:
        if not self.packs:
            return "none"
        forms = ["none", "seq_idx", "seq_idx", "seq_idx+positions", "positions", "positions"]
        forms += ["cu_seq_lens", "cu_seq_lens+positions"] if batch == 1 else []
        return self.random.choice(forms)

    def _rows(self, batch: int, length: int, padded: bool) -> list[list[int | None]]:
        random, side = self.random, self.random.choice(["left", "right", "scattered"])
        rows: list[list[int | None]] = []
        for _ in range(batch):
            tokens: list[int | None] = [*self._tokens(length)]
            holes = random.randint(0, length) if padded else 0
            if side == "scattered":
                for column in random.sample(range(length), holes):
                    tokens[column] = None
            else:
                real = tokens[: length - holes]
                tokens = [None] * holes + real if side == "left" else real + [None] * holes
            rows.append(tokens)
        return rows
