"""One token more of each request, as a CUDA graph would replay it: rehearsed on a CPU by the calls that a step makes.

A graph is recorded once for a number of requests and replayed on the same addresses. So of two steps, every operation
must be the same, on the same memory but for what the step itself has made before; what differs lies in the tokens, the
positions and the pages. A batch that is not full is filled up with rows on a page that nobody has.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.serving.paged_states import PagedModel, Requests
from tests.host_syncs import as_on_an_accelerator
from tests.models.invariances import random_ids
from tests.serving.test_paged_states import FIXED, MAX_TOKENS, model_of

ROWS = 3


class Calls(TorchDispatchMode):
    """Every operation, with the addresses, shapes and strides of what it is given from outside of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.made: list[torch.Tensor] = []  # kept, so that no address is given twice
        self.outside: set[int] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = {tensor.untyped_storage().data_ptr() for tensor in self.made}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        found = []
        for tensor in given:
            if (at := tensor.untyped_storage().data_ptr()) not in made:
                self.outside.add(at)
                found.append((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()))
        self.calls.append((str(operation), *found))
        result = operation(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.made += [x for x in results if x.untyped_storage().data_ptr() not in self.outside]
        return result


class Step:
    """A model whose requests have read some tokens, and what its steps are given: always the same memory."""

    def __init__(self, variant: str, pages: tuple[int, ...]):
        self.model = model_of(variant)
        self.paged = PagedModel(self.model, MAX_TOKENS)
        self.memory = torch.randint(-128, 128, (6, self.paged.layout.num_bytes), dtype=torch.int8)
        self.memory[0] = 0  # as a server's memory begins, which nobody but rows that fill up writes to here
        self.paged.bind(self.memory)
        lengths = [2 + row for row in range(ROWS)]
        places = torch.cat([torch.arange(length) for length in lengths])
        self.paged.forward(
            random_ids(self.model, 1, sum(lengths))[0],
            places,
            Requests(lengths, [0] * ROWS, torch.tensor(pages[:ROWS])),
        )
        self.tokens, self.pages = torch.arange(3, 3 + len(pages)), torch.tensor(pages)
        self.positions = torch.tensor([*lengths, *[1] * (len(pages) - ROWS)])

    def run(self) -> torch.Tensor:
        seen = self.positions.tolist()
        hidden = self.paged.forward(self.tokens, self.positions, Requests([1] * len(seen), seen, self.pages))
        self.tokens.add_(1)
        self.positions.add_(1)
        return hidden


@pytest.mark.parametrize("variant", FIXED)
def test_a_step_has_the_calls_and_addresses_of_the_one_before(variant, monkeypatch):
    monkeypatch.setattr("hf_hybrid_ssm.ops.core.dispatch._ENVIRONMENT_BACKEND", "torch")
    step, calls = Step(variant, (2, 5, 1)), []
    with as_on_an_accelerator():
        step.run()  # computes what is kept
        for pages in ((2, 5, 1), (1, 2, 5)):
            step.pages.copy_(torch.tensor(pages))
            with Calls() as found:
                step.run()
            calls.append(found.calls)
    assert len(calls[0]) > 20 and calls[0] == calls[1]
    addresses = {at for _, *given in calls[0] for at, _, _ in given}
    assert {x.data_ptr() for x in (step.tokens, step.positions, step.pages)} & addresses
    assert addresses & set(range(step.memory.data_ptr(), step.memory.data_ptr() + step.memory.numel()))


@pytest.mark.parametrize("variant", FIXED)
def test_rows_that_fill_a_batch_up_change_nothing(variant):
    """They go on from page 0, of which states come that nobody reads."""
    full, alone = Step(variant, (2, 5, 1, 0, 0)), Step(variant, (2, 5, 1))
    with as_on_an_accelerator():  # which does not look whether a page is given twice
        for _ in range(3):
            torch.testing.assert_close(full.run()[:ROWS], alone.run(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler")
def test_what_a_step_copies():
    """Longhorn's recurrent layers none of a page's bytes; other layers gather their states and put them back."""
    for variant, copies in (("longhorn", 0), ("longhorn + window attention", 3), ("spade s4 window", None)):
        step = Step(variant, (2, 5, 1))
        step.run()
        with Calls() as found:
            step.run()
        memory = range(step.memory.data_ptr(), step.memory.data_ptr() + step.memory.numel())
        gathers = [given for name, *given in found.calls if "index_select" in name and given[0][0] in memory]
        assert len(gathers) == (len(step.paged.layout.states) if copies is None else copies), variant
