"""Between a server's pages and a cache: gather the states of the requests, run the model, scatter them back.

A server that batches continuously keeps one page of memory for each request, and calls the model on whatever tokens it
has scheduled: whole prompts, pieces of prompts, single tokens. A page holds the states of all layers. Every state has
a fixed size and is zero before the first token, in every family, so a page is all that a request needs.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.cache import state_layer
from hf_hybrid_ssm.models.packing import States, packed_rows, with_zero_rows
from hf_hybrid_ssm.serving.state_layout import State, StateLayout, state_layout

ALIGNMENT = 16  # bytes: of no dtype's elements is a page cut
MOST_PADDING = 0.25  # columns of padding for each token of a rectangle


class Requests(NamedTuple):
    """The requests of one forward, R of them; their tokens lie one after the other.

    Args:
        lengths: tokens of each request in this forward, at least 1.
        seen: tokens of each before this forward.
        pages: (R,) int64, the page of each.
    """

    lengths: list[int]
    seen: list[int]
    pages: torch.Tensor


class PageLayout:
    """Where each state lies in a page: widest elements first, so that each is aligned.

    Args:
        layout: the states; none may grow.
    """

    def __init__(self, layout: StateLayout):
        self.states = sorted(layout.states, key=lambda state: -state.dtype.itemsize)
        self.offsets: list[int] = []
        end = 0
        for state in self.states:
            self.offsets.append(end)
            end += state.num_bytes
        self.num_bytes = -(-end // ALIGNMENT) * ALIGNMENT

    def views(self, pages: torch.Tensor) -> list[tuple[State, torch.Tensor]]:
        """(P, at least `num_bytes`) int8 or uint8 → each state as (P, *shape) of its own dtype, in the same memory."""
        places = zip(self.states, self.offsets)
        return [(state, _typed(pages[:, offset : offset + state.num_bytes], state)) for state, offset in places]


def _typed(part: torch.Tensor, state: State) -> torch.Tensor:
    elements = part.view(state.dtype)
    return elements.unflatten(1, state.shape) if state.shape else elements.squeeze(1)


def check_pageable(model: Any, growing: list[int]) -> None:
    """
    Raises:
        ValueError: the model does not continue texts, or `growing` of its layers keep something of every token.
    """
    config = model.config
    if config.is_encoder_decoder or model.get_decoder().is_bidirectional:
        raise ValueError(f"this {config.model_type!r} model does not continue texts: its tokens see the future.")
    if growing:
        raise ValueError(
            f"layers {growing} of this {config.model_type!r} model keep the keys and values of all tokens (full or "
            "global attention): a page of fixed size cannot hold them."
        )


class PagedModel:
    """A causal language model of any family, run on the states of pages.

    Args:
        model: in evaluation mode, with its weights or without.
        max_tokens: of one forward. Requests of different lengths are padded to rectangles of at most as many, of which
            a fifth at most is padding.

    Raises:
        ValueError: a layer keeps the keys and values of all tokens, or the model does not continue texts.
    """

    def __init__(self, model: Any, max_tokens: int):
        self.model, self.max_tokens = model, max_tokens
        check_pageable(model, [])  # before it is run
        layout = state_layout(model)
        check_pageable(model, layout.growing)
        self.layout = PageLayout(layout)
        mixers = [module for module in model.get_decoder().modules() if isinstance(module, RecurrentMixin)]
        # a mixer beside another has its layer's states with that one
        self._take_pages = {mixer.layer_idx for mixer in mixers if mixer.takes_pages}
        self._take_pages -= {mixer.layer_idx for mixer in mixers if not mixer.takes_pages}
        self._views: dict[int, States] = {}

    def bind(self, pages: torch.Tensor) -> None:
        """Take the server's memory: (P, at least `layout.num_bytes`) int8 or uint8, whatever it contains."""
        self._views = {}
        for state, view in self.layout.views(pages):
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
        found: list[torch.Tensor | None] = [None] * len(lengths)
        for rows in self._rectangles(requests):
            index = torch.tensor(rows, device=requests.pages.device)
            part = Requests([lengths[i] for i in rows], [seen[i] for i in rows], requests.pages[index])
            ids, columns = (pad_sequence([of[i] for i in rows], batch_first=True) for of in (tokens, places))
            for i, states in zip(rows, self._run(ids, columns, part)):
                found[i] = states[: lengths[i]]
        return torch.cat([states for states in found if states is not None])

    @torch.no_grad()
    def forward_without_pages(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(T,) → (T, D) of one text: the memory and time that T tokens take, before there are pages."""
        cache = DynamicCache(config=self.model.config)
        decoder = self.model.get_decoder()
        return decoder(input_ids.unsqueeze(0), cache=cache, use_cache=True).last_hidden_state[0]

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
        decoder, cache, pages = self.model.get_decoder(), DynamicCache(config=self.model.config), requests.pages
        begins = positions[:, 0] == 0 if 0 in requests.seen else None
        in_place = self._take_pages if ids.shape[1] == 1 and begins is None else set()
        for index, views in self._views.items():
            layer = state_layer(cache, index)
            if index in in_place:
                layer.hold_pages(views, pages)
            else:  # one column stands for all that went before
                layer.update_states(packed_rows(length=1), _gathered(views, pages, begins))
        hidden_states = decoder(
            ids,
            attention_mask=_mask(requests.lengths, ids),
            position_ids=positions if decoder.has_columns else None,  # the cache counts columns, each request its own
            cache=cache,
            use_cache=True,
            continues_documents=True,
        ).last_hidden_state
        for index in self._views.keys() - in_place:
            for name, view in self._views[index].items():
                view.index_copy_(0, pages, state_layer(cache, index).states[name])
        return hidden_states


def _gathered(views: States, pages: torch.Tensor, begins: torch.Tensor | None) -> States:
    """The states in `pages` (R,), zero in the rows `begins` (R,) bool."""
    rows = {name: view.index_select(0, pages) for name, view in views.items()}
    return rows if begins is None else {name: with_zero_rows(states, begins) for name, states in rows.items()}


def _mask(lengths: list[int], ids: torch.Tensor) -> torch.Tensor | None:
    """(R, L) int64, 1 for the first tokens of each row; None where all have the same length."""
    if min(lengths) == max(lengths):
        return None
    columns = torch.arange(ids.shape[1], device=ids.device)
    return (columns < torch.tensor(lengths, device=ids.device).unsqueeze(1)).long()
