"""What every cell of the matrix asks of a model, and which cells a run has."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from tests.reporting import THOROUGH
from tests.tiny_models import ROWS, batch_of

# of each family its default layers, and a student, for `make test`
EVERY_FAMILY = ("longhorn", "bst sh s4d", "lmu-isa", "spade s4 window", "student: groups", "encoder-decoder")
GREEDY = {"pad_token_id": 0, "do_sample": False}


def rows(*quick: str, every: Sequence[str] = ROWS) -> pytest.MarkDecorator:
    """Every row on the page, these in `make test`."""
    return pytest.mark.parametrize("row", every if THOROUGH else quick)


def cells(columns: Mapping[str, Sequence[str]], **limits: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Columns with the rows of `make test`; all rows on the page. A column's limit is named by its last word."""
    return pytest.mark.parametrize(
        ("column", "row"),
        [
            pytest.param(column, row, marks=limits.get(column.split()[-1], ()))
            for column, quick in columns.items()
            for row in (ROWS if THOROUGH else quick)
        ],
    )


def logits_of(model: torch.nn.Module, row: str) -> torch.Tensor:
    """(B, L, V) of the row's batch, without gradient and without touching the loss's shortcuts."""
    with torch.no_grad():
        return model(**batch_of(row)).logits


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """The model, which drops nothing from now on; in the way of trl and of others."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def check_generation(model: torch.nn.Module, row: str, new_tokens: int = 4) -> None:
    """Greedy tokens must be the same with and without the cache."""
    ids = batch_of(row)["input_ids"]
    length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    texts = [model.generate(input_ids=ids, use_cache=cached, **length, **GREEDY) for cached in (True, False)]
    assert texts[0].tolist() == texts[1].tolist(), "the cache changes the generated tokens"
    assert texts[0].shape[1] >= new_tokens, f"generated {tuple(texts[0].shape)}"


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Largest difference, in units of the largest expected logit."""
    error = ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    assert error <= tolerance, f"{what}: largest difference {error:.1e} of the largest logit, allowed {tolerance:.0e}"
