"""The machine under test: a model with its cache, driven the way a user drives it."""

import copy
from collections.abc import Callable

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from hf_hybrid_ssm.models.cache import fit_cache
from tests.programs.models import VARIANTS, VOCABULARY, build
from tests.programs.oracle import output_of
from tests.programs.program import (
    Compile,
    Copy,
    Crop,
    Feed,
    Illegal,
    Program,
    Reorder,
    Repeat,
    Reset,
    Select,
    Step,
    Switch,
)
from tests.programs.specification import STATIC_SIZE, Row, State

Inputs = dict[str, torch.Tensor]


class Machine:
    """Runs the instructions of one program; every branch has a cache of its own."""

    def __init__(self, program: Program):
        self.program, self.variant = program, VARIANTS[program.variant]
        self.model = self.run = build(program.variant, program.head, program.dtype)
        self.cache = self._new_cache()
        self.branches: list[Cache | None] = []

    def _new_cache(self) -> Cache | None:
        config = self.model.config
        if self.program.cache in ("none", "implicit"):
            return None
        is_static = self.program.cache == "static"
        caches = [
            StaticCache(config=config, max_cache_len=STATIC_SIZE) if is_static else DynamicCache(config=config)
            for _ in range(2)
        ]
        cache = EncoderDecoderCache(*caches) if self.variant.has_encoder else caches[0]
        if self.program.record:
            fit_cache(cache, config)
            cache.activate_past_recording()
        return cache

    def feed(self, step: Feed, before: State) -> torch.Tensor:
        """(B, L, C) the outputs, (B, 1, C) of a sequence classifier; `before` is the state it starts from."""
        return self.call(self.inputs(step, before))

    @torch.no_grad()
    def call(self, inputs: Inputs) -> torch.Tensor:
        if self.variant.is_causal:
            keeps = self.program.cache != "none"
            inputs = inputs | {"past_key_values": self.cache, "use_cache": keeps}
            if self.program.head in ("span", "token") and self.cache is None:
                del inputs["past_key_values"]
        outputs = self.run(**inputs)
        if self.program.cache == "implicit":
            self.cache = outputs.past_key_values
        return output_of(self.model, self.program.head, outputs)

    def apply(self, step: Step) -> None:
        """Every instruction but `Feed` and `Illegal`."""
        match step:
            case Crop(count):
                self.cache.crop(-count)
            case Reorder(rows):
                self.cache.reorder_cache(torch.tensor(rows))
            case Select(rows):
                self.cache.batch_select_indices(torch.tensor(rows))
            case Repeat(times):
                self.cache.batch_repeat_interleave(times)
            case Reset():
                self.cache.reset()
            case Copy():
                self.branches.append(copy.deepcopy(self.cache))
            case Switch(branch):
                self.cache, self.branches[branch] = self.branches[branch], self.cache
            case Compile(backend):
                torch._dynamo.reset()  # after a few shapes of other programs it would give up compiling
                self.run = torch.compile(self.model, backend=backend)

    # what a feed is in tensors

    def inputs(self, step: Feed, before: State) -> Inputs:
        rows = before.rows or [Row() for _ in step.rows]
        real = torch.tensor([[token is not None for token in row] for row in step.rows])
        ids = torch.tensor([[step.filler if token is None else token for token in row] for row in step.rows])
        mask = self._mask(step, rows, real)
        inputs = self._tokens(step, ids, real)
        if self.variant.has_encoder:
            inputs = {f"decoder_{name}": tensor for name, tensor in inputs.items()}
            return inputs | mask | self._source(step, rows)
        return inputs | mask | self._documents(step, rows)

    def _tokens(self, step: Feed, ids: torch.Tensor, real: torch.Tensor) -> Inputs:
        if step.inputs == "ids":
            return {"input_ids": ids}
        embeddings = self.model.get_input_embeddings()(ids).detach()
        if step.inputs == "nan":
            embeddings = embeddings.masked_fill(~real.unsqueeze(2), torch.nan)
        return {"inputs_embeds": embeddings}

    def _mask(self, step: Feed, rows: list[Row], real: torch.Tensor) -> Inputs:
        if step.mask == "none":
            return {}
        if step.mask == "full":
            past = [[column is not None for column in row.columns] for row in rows]
            real = torch.cat([torch.tensor(past, dtype=torch.bool).view(len(rows), -1), real], 1)
        return {f"{'decoder_' if self.variant.has_encoder else ''}attention_mask": real.long()}

    def _documents(self, step: Feed, rows: list[Row]) -> Inputs:
        """Documents are numbered, and positions counted, over everything that the row has read."""
        inputs: Inputs = {}
        after = [row.read(*new) for row, new in zip(rows, zip(step.rows, step.starts))]
        if step.packing.startswith("seq_idx"):
            inputs["seq_idx"] = torch.tensor([_numbers(row, step.length) for row in after], dtype=torch.int32)
        elif step.packing.startswith("cu_seq_lens"):
            numbers = torch.tensor(_numbers(after[0], step.length))
            ends = [0, *(numbers - numbers[0]).bincount().cumsum(0).tolist()]
            lengths = torch.tensor(ends, dtype=torch.int32)
            longest = int(lengths.diff().max())
            inputs |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
            inputs |= {"max_length_q": longest, "max_length_k": longest}  # type: ignore[dict-item]
        if step.gives_positions:
            inputs["position_ids"] = torch.tensor([_positions(row, step.length) for row in after])
        return inputs

    def _source(self, step: Feed, rows: list[Row]) -> Inputs:
        """The encoder's side of the rows, as the first batch was padded; the cache keeps what was made of it."""
        length = max(map(len, self.program.sources))
        left = self.program.source_side == "left"
        padded: list[list[int | None]] = []
        for row in rows:
            padding: list[int | None] = [None] * (length - len(row.source))
            padded.append([*padding, *row.source] if left else [*row.source, *padding])
        real = torch.tensor([[token is not None for token in row] for row in padded])
        ids = torch.tensor([[step.filler if token is None else token for token in row] for row in padded])
        return self._tokens(step, ids, real) | ({} if bool(real.all()) else {"attention_mask": real.long()})

    def refuse(self, step: Illegal, state: State) -> str | None:
        """Try what must not work; None if it is refused as it should be, else what happened."""
        attempt, words = ILLEGAL[step.kind]
        try:
            attempt(self, state)
        except (ValueError, TypeError, RuntimeError) as error:
            if any(word in str(error) for word in words):
                return None
            return f"{step.kind} raises {type(error).__name__} without naming {' or '.join(words)}: {error}"
        except Exception as error:
            return f"{step.kind} raises {type(error).__name__}: {error}"
        return f"{step.kind} is not refused"


def _numbers(row: Row, length: int) -> list[int]:
    """The document of each of the last columns; padding goes with the token before it."""
    numbers, number = [], 0
    for column in row.columns:
        number = number if column is None else column[0]
        numbers.append(number)
    return numbers[-length:]


def _positions(row: Row, length: int) -> list[int]:
    """The place of each of the last columns in its document; 1 at padding, as `generate` has it."""
    counts: dict[int, int] = {}
    positions = []
    for column in row.columns:
        if column is None:
            positions.append(1)
            continue
        positions.append(counts.get(column[0], 0))
        counts[column[0]] = positions[-1] + 1
    return positions[-length:]


Attempt = Callable[[Machine, State], None]


def _plain(rows: int = 0, tokens: tuple[int, ...] = (3,), **more: Callable[[int, int, int], torch.Tensor]) -> Attempt:
    """More tokens for each row of a batch and `rows` others, with what `more` has instead, made of the batch, the
    length and the columns of the past."""

    def attempt(machine: Machine, state: State) -> None:
        batch, width = len(state.rows) + rows, len(tokens)
        feed = Feed(rows=[[*tokens] for _ in range(batch)], starts=[[] for _ in range(batch)])
        inputs = machine.inputs(feed, State([state.rows[index % len(state.rows)] for index in range(batch)]))
        prefix = "decoder_" if machine.variant.has_encoder else ""
        given = {f"{prefix}{name}": make(batch, width, state.num_columns) for name, make in more.items()}
        machine.call(inputs | given)

    return attempt


def _contradicting(changes: Callable[[list[bool]], list[int]]) -> Attempt:
    """A mask of all columns that says something else of the past, in the first row of which `changes` finds places."""

    def attempt(machine: Machine, state: State) -> None:
        past = [[column is not None for column in row.columns] for row in state.rows]
        for row in past:
            if places := changes(row):
                for place in places:
                    row[place] = not row[place]
                break
        mask = torch.cat([torch.tensor(past), torch.ones(len(past), 1, dtype=torch.bool)], 1).long()
        _plain(attention_mask=lambda batch, length, past: mask)(machine, state)

    return attempt


def _first(row: list[bool], what: bool) -> list[int]:
    return [row.index(what)] if what in row else []


def _one_of_each(row: list[bool]) -> list[int]:
    return _first(row, True) + _first(row, False) if len(set(row)) == 2 else []


def _foreign_cache(machine: Machine, state: State) -> None:
    step = Feed(rows=[[3]] * len(state.rows), starts=[[] for _ in state.rows])
    machine.model(**machine.inputs(step, State(state.rows)), past_key_values="none")


MASK, SEQ_IDX, CROP = ("attention_mask",), ("seq_idx",), ("static", "dynamic")
PAST = ("attention_mask calls other columns of the past padding than the forwards that read them",)
FALLING = torch.tensor([[10**6, 10**6 - 1]], dtype=torch.int32)
ILLEGAL: dict[str, tuple[Attempt, tuple[str, ...]]] = {
    "batch": (_plain(rows=1), ("batch",)),
    "vocabulary": (_plain(tokens=(VOCABULARY,)), ("vocab_size",)),
    "no token": (_plain(input_ids=lambda batch, length, past: torch.zeros(batch, 0).long()), ("input_ids",)),
    "float ids": (_plain(input_ids=lambda batch, length, past: torch.zeros(batch, length)), ("input_ids",)),
    "mask too short": (_plain(tokens=(3, 4), attention_mask=lambda batch, length, past: torch.ones(batch, 1)), MASK),
    "mask of another batch": (_plain(attention_mask=lambda batch, length, past: torch.ones(batch + 1, length)), MASK),
    "mask too long": (_plain(attention_mask=lambda batch, length, past: torch.ones(batch, past + length + 1)), MASK),
    "mask values": (_plain(attention_mask=lambda batch, length, past: -torch.ones(batch, length).long()), MASK),
    "past text as padding": (_contradicting(lambda row: _first(row, True)), PAST),
    "past padding as text": (_contradicting(lambda row: _first(row, False)), PAST),
    "past padding elsewhere": (_contradicting(_one_of_each), PAST),
    "seq_idx shape": (_plain(seq_idx=lambda batch, length, past: torch.zeros(batch, length + 1).int()), SEQ_IDX),
    "seq_idx falls": (_plain(tokens=(3, 4), seq_idx=lambda batch, length, past: FALLING.expand(batch, 2)), SEQ_IDX),
    "position_ids shape": (
        _plain(position_ids=lambda batch, length, past: torch.zeros(batch, length + 1).long()),
        ("position_ids",),
    ),
    "deep crop": (
        lambda machine, state: machine.cache.crop(-(state.undoable or 0) - 1),
        ("tokens_to_remove", "activate_past_recording", *CROP),
    ),
    "crop forward": (lambda machine, state: machine.cache.crop(1), ("tokens_to_remove", "positive", *CROP)),
    "foreign cache": (_foreign_cache, ("cache must be",)),
}
