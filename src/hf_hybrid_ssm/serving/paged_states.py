"""Between a server's pages and a cache: gather the states of the requests, run the model, scatter them back.

A server that batches continuously keeps one page of memory for each request, and calls the model on whatever tokens it
has scheduled: whole prompts, pieces of prompts, single tokens. A page holds the states of all layers. Every state has
a fixed size and is zero before the first token, in every family, so a page is all that a request needs; but for full
attention, whose keys and values the server keeps itself, and attends to (`AttentionServer`).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.cache import prepare_cache, state_layer
from hf_hybrid_ssm.models.configuration import STATE_LAYER_TYPE
from hf_hybrid_ssm.models.packing import States, packed_rows, with_zero_rows
from hf_hybrid_ssm.ops.core.pages import Attend
from hf_hybrid_ssm.serving.state_layout import (
    FullAttention,
    PagedLayer,
    StateLayout,
    StateSpec,
    serve_layer,
    state_layout,
)
from hf_hybrid_ssm.students.outputs import logits_of

ALIGNMENT = 16  # bytes: of no dtype's elements is a page cut
MOST_PADDING = 0.25  # columns of padding for each token of a rectangle


class Requests(NamedTuple):
    """The requests of one forward, R of them; their tokens lie one after the other.

    Args:
        lengths: tokens of each request in this forward, at least 1.
        seen: tokens of each before this forward.
        pages: (R,) int64, the page of each.
        rows: which of the server's requests in this forward they are; None: all, in its order.
    """

    lengths: list[int]
    seen: list[int]
    pages: torch.Tensor
    rows: tuple[int, ...] | None = None


class AttentionServer(Protocol):
    """Keeps the keys and values of all tokens of each request, and attends to them causally.

    Called with the number of the layer and the next tokens of all `requests`, one request after the other: queries
    (T, H, E), keys and values (T, G, E) → (T, H · E).
    """

    def __call__(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, requests: Requests
    ) -> torch.Tensor: ...


class PageLayout:
    """Where each state lies in a page: widest elements first, so that each is aligned.

    Args:
        states: none may grow.
        num_parts: a page is in as many parts of one size, in memories of their own: a server may want them no larger
            than what it keeps of a layer's keys. Each state lies in the part that is the emptiest so far.

    Attributes:
        states, parts, offsets: each state, its part, and where it begins there.
        num_bytes: of a part.
    """

    def __init__(self, states: list[StateSpec], num_parts: int = 1):
        self.states = sorted(states, key=lambda state: (-state.dtype.itemsize, -state.num_bytes))
        self.num_parts = num_parts
        self.parts: list[int] = []
        self.offsets: list[int] = []
        ends = [0] * num_parts
        for state in self.states:
            part = ends.index(min(ends))
            self.parts.append(part)
            self.offsets.append(ends[part])
            ends[part] += state.num_bytes
        self.num_bytes = max(-(-max(ends) // ALIGNMENT), 1) * ALIGNMENT

    def views(self, pages: torch.Tensor, part: int = 0) -> list[tuple[StateSpec, torch.Tensor]]:
        """(P, at least `num_bytes`) int8 or uint8, a part of all pages → each state in it as (P, *shape) of its own
        dtype, in the same memory."""
        places = [place for place in zip(self.states, self.offsets, self.parts) if place[2] == part]
        return [(state, _typed(pages[:, offset : offset + state.num_bytes], state)) for state, offset, _ in places]


def _typed(part: torch.Tensor, state: StateSpec) -> torch.Tensor:
    elements = part.view(state.dtype)
    return elements.unflatten(1, state.shape) if state.shape else elements.squeeze(1)


def check_continues(model: Any) -> None:
    """
    Raises:
        ValueError: the model does not continue texts.
    """
    config = model.config
    if config.is_encoder_decoder or model.get_decoder().is_bidirectional:
        raise ValueError(f"this {config.model_type!r} model does not continue texts: its tokens see the future.")


def check_pageable(model: Any, layout: StateLayout, has_server: bool) -> None:
    """
    Args:
        has_server: the server keeps keys and values, and attends to them.

    Raises:
        ValueError: a layer keeps something of every token that the server does not.
    """
    growing, model_type = layout.growing, model.config.model_type
    if growing and not has_server:
        raise ValueError(
            f"layers {growing} of this {model_type!r} model keep the keys and values of all tokens (full or "
            "global attention): a page of fixed size cannot hold them."
        )
    if foreign := sorted(set(growing) - {attention.layer for attention in layout.attention} if has_server else ()):
        raise ValueError(
            f"layers {foreign} of this {model_type!r} model keep states in cache layers of transformers "
            "(convolutions, recurrences of a teacher), which pages do not hold: call generate."
        )
    for what in sorted({other for attention in layout.attention for other in attention.others}):
        layers = [attention.layer for attention in layout.attention if what in attention.others]
        raise ValueError(
            f"layers {layers} of this {model_type!r} model {what} full attention, which a server's attention does not "
            "have: attention within a window or a chunk has it."
        )


class PagedModel:
    """A causal language model of any family, run on the states of pages.

    Args:
        model: in evaluation mode, with its weights or without.
        max_tokens: of one forward. Requests of different lengths are padded to rectangles of at most as many, of which
            a fifth at most is padding.
        serve: makes the server's attention for the layers that attend to all tokens; without it they are refused.
            A page has then as many parts as there are such layers (`PageLayout`).

    Raises:
        ValueError: a layer keeps the keys and values of all tokens, and the server does not; or the model does not
            continue texts.
    """

    def __init__(
        self, model: Any, max_tokens: int, serve: Callable[[list[FullAttention]], AttentionServer] | None = None
    ):
        self.model, self.max_tokens = model, max_tokens
        check_continues(model)  # before it is run
        layout = state_layout(model)
        check_pageable(model, layout, serve is not None)
        self._attending = [attention.layer for attention in layout.attention]
        self._server = serve(layout.attention) if serve is not None and layout.attention else None
        self.layout = PageLayout(layout.beside_served(), max(len(layout.attention), 1))
        mixers = [module for module in model.get_decoder().modules() if isinstance(module, RecurrentMixin)]
        # a mixer beside another has its layer's states with that one
        self._take_pages = {mixer.layer_idx for mixer in mixers if mixer.takes_pages}
        self._take_pages -= {mixer.layer_idx for mixer in mixers if not mixer.takes_pages}
        self._views: dict[int, States] = {}

    def bind(self, pages: torch.Tensor, part: int = 0) -> None:
        """Take the server's memory of a part of all pages: (P, at least `layout.num_bytes`) int8 or uint8, whatever
        it contains."""
        for state, view in self.layout.views(pages, part):
            self._views.setdefault(state.layer, {})[state.name] = view

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, requests: Requests) -> torch.Tensor:
        """Read the next tokens of every request, and leave its new states in its page.

        Where every request has one token after earlier ones, nothing is read from the device, nor sent to it.

        Args:
            input_ids: (T,) int, T the sum of `requests.lengths`.
            positions: (T,) int, of each token in its request.

        Returns:
            (T, D) after the last norm, before the head.
        """
        lengths, seen = requests.lengths, requests.seen
        if all(length == 1 and before > 0 for length, before in zip(lengths, seen)):
            return self._run(input_ids.unsqueeze(1), positions.unsqueeze(1), requests)[:, 0]
        tokens, places = input_ids.split(lengths), positions.split(lengths)
        outputs: list[torch.Tensor | None] = [None] * len(lengths)
        for rows in self._rectangles(requests):
            index = torch.tensor(rows, device=requests.pages.device)
            part = Requests([lengths[i] for i in rows], [seen[i] for i in rows], requests.pages[index], tuple(rows))
            ids, columns = (pad_sequence([of[i] for i in rows], batch_first=True) for of in (tokens, places))
            for i, states in zip(rows, self._run(ids, columns, part)):
                outputs[i] = states[: lengths[i]]
        return torch.cat([states for states in outputs if states is not None])

    @torch.no_grad()
    def forward_without_pages(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(T,) → (T, D) of one text: the memory and time that T tokens take, before there are pages."""
        cache, pages = prepare_cache(None, self.model.config, 1), torch.zeros_like(input_ids[:1], dtype=torch.int64)
        for index in self._attending:
            serve_layer(cache, index, self._attend(index, Requests([len(input_ids)], [0], pages)), {}, pages)
        decoder, positions = self.model.get_decoder(), None
        if decoder.uses_positions:  # a layer that asks the server counts a token before
            positions = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(0)
        options = {"position_ids": positions, "use_cache": True, "continues_documents": True}
        return decoder(input_ids.unsqueeze(0), cache=cache, **options).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(N, D) of `forward` → (N, V), by the model's own head and what its forward does around it."""
        return logits_of(self.model, hidden_states.unsqueeze(0))[0]

    def _rectangles(self, requests: Requests) -> Iterator[list[int]]:
        """The requests in groups that are run together: single tokens that go on, then the others by length.

        Of several prompts, those of like lengths are together: a rectangle of all of them could be padding by half.
        """
        lengths, seen = requests.lengths, requests.seen
        steps = [i for i, (length, before) in enumerate(zip(lengths, seen)) if length == 1 and before > 0]
        if steps:
            yield steps
        group: list[int] = []
        for i in sorted(set(range(len(lengths))) - set(steps), key=lambda i: -lengths[i]):
            size, real = (len(group) + 1) * lengths[(group or [i])[0]], sum(lengths[j] for j in group) + lengths[i]
            if group and (size > self.max_tokens or size > (1 + MOST_PADDING) * real):
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, requests: Requests) -> torch.Tensor:
        """Rows (R, L) whose real tokens come first → (R, L, D)."""
        decoder, pages = self.model.get_decoder(), requests.pages
        cache = prepare_cache(None, self.model.config, len(pages))
        begins = positions[:, 0] == 0 if 0 in requests.seen else None
        in_place = self._take_pages if ids.shape[1] == 1 and begins is None else set()
        for index, views in self._views.items():
            if index in in_place:
                cache.layers[index] = PagedLayer.from_pages(pages, views, in_place=True)
            elif index not in self._attending:  # one column stands for all that went before
                state_layer(cache, index).update_states(packed_rows(length=1), _gathered(views, pages, begins))
        for index in self._attending:
            states = _gathered(self._views.get(index, {}), pages, begins)
            serve_layer(cache, index, self._attend(index, requests), states, pages)
        mask = _mask(requests.lengths, ids)
        is_masked_by_server = decoder.uses_positions and self._attending
        hidden_states = decoder(
            ids,
            attention_mask={STATE_LAYER_TYPE: mask, "full_attention": None} if is_masked_by_server else mask,
            # the cache counts columns, each request its own
            position_ids=positions if decoder.uses_positions else None,
            cache=cache,
            use_cache=True,
            continues_documents=True,
        ).last_hidden_state
        for index in self._views.keys() - in_place:
            for name, view in self._views[index].items():
                view.index_copy_(0, pages, state_layer(cache, index).states[name])
        return hidden_states

    def _attend(self, layer: int, requests: Requests) -> Attend:
        """Full attention of rows (R, ., L, E) whose real tokens come first, by the server."""
        lengths, server = requests.lengths, self._server
        assert server is not None

        def attend(queries, keys, values, **options):
            batch, length = len(lengths), queries.shape[2]
            real = None
            if min(lengths) < max(lengths):
                columns = [torch.arange(count) + row * length for row, count in enumerate(lengths)]
                real = torch.cat(columns).to(queries.device)
            attended = server(layer, _flat(queries, real), _flat(keys, real), _flat(values, real), requests)
            if real is not None:
                attended = attended.new_zeros(batch * length, attended.shape[1]).index_copy_(0, real, attended)
            return attended.view(batch, length, -1)

        return attend


def _flat(heads: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """(R, H, L, E) → (T, H, E), the tokens `real` (T,) int64 of R · L; None: all."""
    flat = heads.transpose(1, 2).flatten(0, 1)
    return flat.contiguous() if real is None else flat.index_select(0, real)


def _gathered(views: States, pages: torch.Tensor, begins: torch.Tensor | None) -> States:
    """The states in `pages` (R,), zero in the rows `begins` (R,) bool."""
    gathered = {name: view.index_select(0, pages) for name, view in views.items()}
    return gathered if begins is None else {name: with_zero_rows(states, begins) for name, states in gathered.items()}


def _mask(lengths: list[int], ids: torch.Tensor) -> torch.Tensor | None:
    """(R, L) int64, 1 for the first tokens of each row; None where all have the same length."""
    if min(lengths) == max(lengths):
        return None
    columns = torch.arange(ids.shape[1], device=ids.device)
    return (columns < torch.tensor(lengths, device=ids.device).unsqueeze(1)).long()
