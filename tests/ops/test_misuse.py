"""What no op can do is refused by every backend alike, before memory is read or written that is not the tensors'."""

import re

import pytest
import torch

from hf_hybrid_ssm.ops.core import checks
from hf_hybrid_ssm.ops.core import rows as core_rows
from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.ops.implicit_attention.decoding import DeferredMemory
from hf_hybrid_ssm.ops.implicit_attention.native import decode_token
from hf_hybrid_ssm.ops.implicit_attention.reference import ImplicitInputs
from tests.ops.misuse_cases import MEANT, REFUSED, UNREAD, draw

NATIVE = pytest.param("native", marks=pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler"))
BACKENDS = ["reference", "torch", NATIVE]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name, backend):
    call, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        call(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MEANT)
def test_is_what_it_means(name, backend):
    odd, meant = (call(backend) for call in MEANT[name])
    torch.testing.assert_close(odd, meant, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", UNREAD)
def test_lengths_that_were_not_looked_at(name, backend, monkeypatch):
    """As under `torch.compile`: they reach the backend, which stays within the row, or says that they do not."""
    call, within = UNREAD[name], torch.tensor([12, 0])
    want = call(within if name != "lti_scan" else torch.tensor([40, 0]))(backend)
    for module in (checks, core_rows):
        monkeypatch.setattr(module, "can_read_values", lambda tensor: False)
    try:
        got = call(torch.tensor([2**40, -(2**40)]))(backend)
    except (RuntimeError, IndexError) as error:
        assert backend != "native" or name == "causal_conv"  # its state is taken out of the row by torch
        assert re.search("out of (bounds|range)", str(error))
        return
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler")
@pytest.mark.parametrize("pending", [-1, 65])
def test_a_memory_that_lags_by_what_cannot_be(pending):
    weight, bias, collapse = draw(3, 4, 6), draw(3, 4, seed=1), draw(4, seed=2)
    token = ImplicitInputs(draw(1, 1, 16), weight, bias, collapse, None, theta=9.0, scale=1.0)
    state = DeferredMemory(torch.zeros(1, 6, 16), torch.zeros(1, 64, 16), torch.tensor([pending]))
    with pytest.raises(ValueError, match="pending must say how many of the C tokens"):
        decode_token(token, state)
