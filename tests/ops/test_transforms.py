"""Forward-mode derivatives, vmap and per-sample gradients of every op equal finite differences and loops over rows."""

from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, jvp, vmap

from hf_hybrid_ssm.layers.mixers.registry import MIXERS, build_mixer
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.ops.linear_cross_entropy import linear_cross_entropy
from hf_hybrid_ssm.ops.linear_kl_divergence import linear_kl_divergence
from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition
from tests.row_options import (
    causal_conv,
    diagonal_scan,
    implicit_attention,
    legendre_memory,
    local_attention,
    long_conv,
    longhorn_scan,
    lti_scan,
)
from tests.tiny_models import built

B, L, D, N = 2, 37, 3, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 32, [0] * 20 + [1] * 3 + [2] * 14])


def filtered(u, diagonal, entering, output):
    return lti_scan(u, ChannelSystem(Transition(diagonal.sigmoid(), "real"), entering, output))[0]


def labels_of(hidden):
    return torch.arange(hidden.shape[:-1].numel()).view(hidden.shape[:-1]) % 7


def loss(hidden, weight):
    return linear_cross_entropy(hidden, weight, labels_of(hidden), chunk_size=5)


def divergence(hidden, weight):
    """From a teacher of width 3."""
    teacher, head = torch.linspace(-1, 1, 3 * L).view(L, 3).to(hidden), torch.linspace(-1, 1, 21).view(7, 3).to(hidden)
    rows = hidden.shape[:-1]
    return linear_kl_divergence(hidden, weight, teacher.expand(*rows, 3), head, temperature=2.0, chunk_size=5)


def attention(q, k, v, bias, **options):
    return local_attention(q, k, v, bias=bias, window=(6, 0), **options)[0]


def attention_and_sink(q, k, v, bias, value):
    return attention(q, k, v, bias, sink_logits=q.sum(-1), sink_values=value)


ATTENDED = [(B, 2, L, N), (B, 2, L, N), (B, 2, L, N), (2, 7)]
# a function of float tensors, and their shapes; the first is the one with rows of its own
OPS = {
    "longhorn_scan": (lambda *t: longhorn_scan(*t)[0], [(B, L, D), (B, L, D), (B, L, N), (B, L, N)]),
    "longhorn_scan packed": (
        lambda *t: longhorn_scan(*t, seq_idx=DOCUMENTS[: t[0].shape[0]])[0],
        [(B, L, D), (B, L, D), (B, L, N), (B, L, N)],
    ),
    "causal_conv": (lambda *t: causal_conv(*t, activation="silu")[0], [(B, L, D), (D, 4), (D,)]),
    "long_conv fft": (lambda u, h: long_conv(u, h)[0], [(B, L, D), (D, 20)]),
    "long_conv two-sided": (
        lambda u, h, f: long_conv(u, h, future_kernel=f)[0],
        [(B, L, D), (D, 20), (D, 9)],
    ),
    "long_conv packed": (
        lambda u, h: long_conv(u, h, seq_idx=DOCUMENTS[: u.shape[0]])[0],
        [(B, L, D), (D, 20)],
    ),
    "local_attention": (attention, ATTENDED),
    "local_attention packed": (lambda *t: attention(*t, seq_idx=DOCUMENTS[: t[0].shape[0]]), ATTENDED),
    "local_attention with a sink": (attention_and_sink, [*ATTENDED, (2, N)]),
    "legendre_memory": (lambda x, w: legendre_memory(x, w, order=N, theta=9.0)[0], [(B, L, D), (2, N)]),
    "legendre_memory packed": (
        lambda x, w: legendre_memory(x, w, order=N, theta=9.0, seq_idx=DOCUMENTS[: x.shape[0]])[0],
        [(B, L, D), (2, N)],
    ),
    "implicit_attention": (
        lambda x, w, c: implicit_attention(x, w, None, c, None, theta=9.0)[0],
        [(B, L, D), (3, 2, N), (2,)],
    ),
    "diagonal_scan": (lambda x, a: diagonal_scan(a.sigmoid(), x)[0], [(B, L, D), (D,)]),
    "lti_scan": (filtered, [(B, L, D), (1, D, N), (1, D, N), (1, D, N)]),
    "linear_cross_entropy": (loss, [(B, L, D), (7, D)]),
    "linear_kl_divergence": (divergence, [(B, L, D), (7, D)]),
}


def drawn(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # float32: what kernels compute


def slope(function, points, tangents):
    """The directional derivative by central differences in float64."""
    points, tangents = ([t.double() for t in group] for group in (points, tangents))
    ahead, back = (function(*(p + h * t for p, t in zip(points, tangents))) for h in (1e-5, -1e-5))
    return ((ahead - back) / 2e-5).float()


@pytest.mark.parametrize("case", OPS)
@pytest.mark.parametrize("trains", [False, True])
def test_forward_mode(case, trains):
    function, shapes = OPS[case]
    points, tangents = drawn(shapes), drawn(shapes, 1)
    expected = slope(function, points, tangents)
    found = jvp(function, points, tangents)[1]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p.clone().requires_grad_(trains), t) for p, t in zip(points, tangents)]
        found = forward_ad.unpack_dual(function(*duals)).tangent
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("case", OPS)
def test_vmap(case):
    """Over all arguments, and over the inputs alone."""
    function, shapes = OPS[case]
    stacks = drawn([(3, *shape) for shape in shapes])
    for over in (0, (0,) + (None,) * (len(shapes) - 1)):
        arguments = [stack if over == 0 or index == 0 else stack[0] for index, stack in enumerate(stacks)]
        found = vmap(function, in_dims=over)(*arguments)
        rows = [
            function(*(a[i] if over == 0 or index == 0 else a for index, a in enumerate(arguments))) for i in range(3)
        ]
        torch.testing.assert_close(found, torch.stack(rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", OPS)
def test_gradients_of_each_sample(case):
    function, shapes = OPS[case]
    first, *rest = drawn([(3, *shapes[0]), *shapes[1:]])
    last = len(shapes) - 1

    def value(*tensors):
        return function(*tensors).square().sum()

    found = vmap(grad(value, argnums=last), in_dims=(0,) + (None,) * last)(first, *rest)
    for sample, gradient in zip(first, found):
        tensors = [sample, *(t.clone().requires_grad_() for t in rest)]
        (expected,) = torch.autograd.grad(value(*tensors), tensors[last])
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_mixers_of_substituted_parameters(name):
    """A filter that is remembered must not be, where its parameters carry tangents."""
    torch.manual_seed(0)
    mixer = build_mixer(name, D)
    u = torch.randn(1, L, D)
    weights = {key: value.detach() for key, value in mixer.named_parameters()}
    tangents = {key: 0.1 * torch.randn_like(value) for key, value in weights.items()}
    with torch.no_grad():
        mixer(u)  # remembers

    def run(weights, u):
        return torch.func.functional_call(mixer, weights, (u,))[0]

    if not weights:
        return
    if name == "lstm":
        with pytest.raises((NotImplementedError, RuntimeError), match=r"forward|lstm|LSTM"):
            jvp(partial(run, u=u), (weights,), (tangents,))
        return
    found = jvp(partial(run, u=u), (weights,), (tangents,))[1]
    double, u = build_mixer(name, D, dtype=torch.float64), u.double()

    def moved(step):
        values = {key: weights[key].double() + step * tangents[key].double() for key in weights}
        return torch.func.functional_call(double, values, (u,))[0]

    expected = ((moved(1e-5) - moved(-1e-5)) / 2e-5).float()
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_forced_backend_without_rules_says_so(name):
    tensors = drawn(OPS["longhorn_scan"][1])
    with backend(name), pytest.raises(ValueError, match=r"no rules for forward-mode differentiation"):
        vmap(lambda x: longhorn_scan(x, *tensors[1:])[0])(tensors[0].expand(2, -1, -1, -1))


def test_vmap_over_documents_is_refused_by_name():
    seq_idx = torch.stack([DOCUMENTS, DOCUMENTS])
    x = torch.randn(2, B, L, D)
    with pytest.raises(ValueError, match="seq_idx must not be mapped over"):
        vmap(lambda x, s: legendre_memory(x, order=N, theta=9.0, seq_idx=s)[0])(x, seq_idx)


def test_compiled_functions_ask_again():
    """Compiled outside of a transform, a function must not keep its kernel inside of one; torch 2.14 compiles nothing
    of tensors with tangents, so that there is no whole graph."""
    tensors = drawn(OPS["longhorn_scan"][1])
    compiled = torch.compile(OPS["longhorn_scan"][0], backend="eager")
    compiled(*tensors)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        found = forward_ad.unpack_dual(compiled(dual, *tensors[1:])).tangent
    tangents = (torch.ones_like(tensors[0]), *(torch.zeros_like(t) for t in tensors[1:]))
    torch.testing.assert_close(found, jvp(OPS["longhorn_scan"][0], tensors, tangents)[1])


@pytest.mark.parametrize("case", ["longhorn", "spade full, trained s4", "bst sh", "bst brect", "lmu_isa"])
def test_forward_mode_of_models(case):
    model = built(case).double().eval()
    ids = torch.arange(3, 23).unsqueeze(0)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    tangents = {n: 0.1 * torch.randn(w.shape, dtype=w.dtype, generator=generator) for n, w in weights.items()}

    def logits(weights):
        return torch.func.functional_call(model, weights, kwargs={"input_ids": ids, "use_cache": False}).logits

    def moved(step):
        return logits({name: weights[name] + step * tangents[name] for name in weights})

    found, expected = jvp(logits, (weights,), (tangents,))[1], (moved(1e-6) - moved(-1e-6)) / 2e-6
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
