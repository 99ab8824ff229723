"""FlexAttention computes what local attention is. On a CPU it runs as plain torch, whose gradients torch withholds
from users because they are not compiled."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from hf_hybrid_ssm.ops.local_attention import _OP, flex_attention
from hf_hybrid_ssm.ops.local_attention.inputs import AttentionInputs
from hf_hybrid_ssm.ops.local_attention.reference import EXAMPLES, local_attention_reference
from tests.row_options import local_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called")
CASES = {
    "window with bias": {"window": (20, 0), "bias": 21},
    "short table": {"window": (33, 0), "bias": 5},
    "zero sink": {"window": (20, 0), "bias": 21, "zero_kv_sink": True},
    "zero sink without itself": {"window": (20, -1), "bias": 40, "zero_kv_sink": True},
    "without itself": {"window": (20, -1)},
    "two-sided": {"window": (9, 30), "bias": 61},
    "chunks": {"window": (9, 0), "chunk_size": 10, "bias": 10},
    "all": {"window": (None, 0), "bias": 8},
    "both ways, all": {"window": (None, None)},
    "shared keys": {"window": (20, 0), "bias": 21, "groups": 1},
    "scalar sink": {"window": (20, 0), "bias": 21, "sink": 0},
    "constant sink": {"window": (20, -1), "sink": 1, "groups": 1},
    "a constant sink for each head, of chunks": {"window": (9, 0), "chunk_size": 10, "sink": 2},
}
ROWS = ["plain", "packed", "padded", "packed and padded"]


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_attention, "supports", lambda device_type, dtype: None)
    monkeypatch.setattr(flex_attention, "LEAST_HEAD", 1)
    monkeypatch.setattr(_OP, "unavailable", lambda *arguments: None)
    monkeypatch.setitem(_OP._loaded, "triton", flex_attention.local_attention_triton)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_torch_implementation(without_compiler, case, rows):
    """In float64, outputs and gradients, that of the bias included."""
    options = dict(CASES[case])
    generator = torch.Generator().manual_seed(0)
    length, groups, size, sink = 150, options.pop("groups", 2), options.pop("bias", None), options.pop("sink", None)
    shapes = [(2, 2, length, 4), (2, groups, length, 4), (2, groups, length, 6)]
    shapes += [] if size is None else [(2, size)]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    options["bias"] = None if size is None else leaves[3]
    if sink is not None:
        leaves.append(torch.randn(2, 2, length, generator=generator, dtype=torch.float64, requires_grad=True))
        logits = leaves[-1]
    if sink:
        leaves.append(torch.randn(sink, 6, generator=generator, dtype=torch.float64, requires_grad=True))
        options["sink_values"] = leaves[-1]
    if "packed" in rows:
        options["seq_idx"] = (torch.rand(2, length, generator=generator) < 0.05).cumsum(1)
    real = torch.ones(2, length, dtype=torch.bool)
    if "padded" in rows:
        options["lengths"] = torch.tensor([length - 22, 0 if rows == "padded" else 40])
        real = torch.arange(length) < options["lengths"].unsqueeze(1)
    results = []
    for backend in ("triton", "torch"):
        if sink is not None:
            options["sink_logits"] = logits.masked_fill(torch.arange(length) <= 20, -torch.inf)
        y, _ = local_attention(*leaves[:3], **options, backend=backend)
        y = torch.where(real[:, None, :, None], y, 0.0)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        results.append([y, *torch.autograd.grad((y * weights).sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def test_what_it_has_not_is_left_to_torch(without_compiler, monkeypatch):
    """Dropout, a state, short rows, and chunks without bias or documents; everything else is its own."""
    calls = []
    monkeypatch.setattr(flex_attention, "local_attention_torch", calls.append)
    q = torch.randn(1, 1, 130, 4)
    inputs = AttentionInputs(q, q, q, window=(3, 0), scale=1.0)
    assert flex_attention.local_attention_triton(inputs).shape == q.shape and calls == []
    short = dict.fromkeys("qkv", q[:, :, :5])
    for change in ({"dropout": 0.1}, {"softcap": 2.0}, {"state": ()}, short):
        flex_attention.local_attention_triton(inputs._replace(**change))
    assert len(calls) == 4 and calls[0].dropout == 0.1
    chunks = inputs._replace(window=(9, 0), chunk_size=10)
    documents, sink = torch.zeros(1, 130, dtype=torch.int64), torch.zeros(1, 1, 130)
    for more in ({}, {"bias": torch.zeros(1, 10)}, {"seq_idx": documents}, {"sink_logits": sink}):
        flex_attention.local_attention_triton(chunks._replace(**more))
    assert len(calls) == 5 and calls[4].chunk_size == 10


@pytest.mark.parametrize("window", [(5, 0), (200, -1), (128, 0), (127, 300), (None, 0), (3, None)])
def test_no_block_of_a_window_is_left_out(window):
    """Each key that a query sees lies in a block that is visited, and each block that is visited holds one."""
    length = 700
    count, indices = (table[0, 0] for table in flex_attention._visited(length, window, torch.device("cpu")))
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    left, right = (length if limit is None else limit for limit in window)
    seen = (distance <= left) & (distance >= -right)
    seen = torch.nn.functional.pad(seen, (0, -length % 128, 0, -length % 128))
    wanted = seen.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).any(3).any(1)
    visited = torch.stack([torch.isin(torch.arange(6), row[:size]) for row, size in zip(indices, count)])
    assert torch.equal(visited, wanted)


def test_only_what_can_be_compiled():
    assert "not torch.float64" in flex_attention.supports("cuda", torch.float64)
    assert "not on cpu" in flex_attention.supports("cpu", torch.float32)


def test_self_check_covers_more_than_a_block(without_compiler):
    inputs = EXAMPLES[0]()
    assert inputs.length > flex_attention.BLOCK and inputs.zero_kv_sink and inputs.bias is not None
    y, expected = flex_attention.local_attention_triton(inputs), local_attention_reference(inputs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


def test_every_configuration_is_compiled_by_itself(without_compiler, monkeypatch):
    """Of one function torch keeps few compiled forms, and refuses the next: here five meet a limit of three, which are
    those of one configuration (two lengths, and another number of blocks)."""
    monkeypatch.setattr(flex_attention, "OPTIONS", {"fullgraph": True, "backend": "eager"})
    monkeypatch.setattr(flex_attention, "_is_compiled", lambda q: True)
    flex_attention._compiled.cache_clear()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=3):
        for length, size, heads in ((150, 4, 2), (200, 4, 2), (300, 4, 2), (150, 8, 2), (150, 4, 3)):
            q, k, v = torch.randn(3, 2, heads, length, size).unbind(0)
            y = flex_attention.local_attention_triton(AttentionInputs(q, k, v, window=(20, 0), scale=1.0))
            want, _ = local_attention(q, k, v, window=(20, 0), scale=1.0, backend="reference")
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    assert flex_attention._compiled.cache_info().currsize == 3
    flex_attention._compiled.cache_clear()
    torch._dynamo.reset()
