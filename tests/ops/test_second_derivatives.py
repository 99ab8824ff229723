"""Second derivatives are right, or an error that says what to do: of every op, autograd function and model."""

import copy
import importlib
import pkgutil

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_hybrid_ssm
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.ops.core.l2_normalise import l2_normalise
from tests.ops.test_transforms import OPS, drawn
from tests.students.teachers import exactly
from tests.tiny_models import EVERY, STUDENTS, build, inputs_for

STEP = 1e-5
REFUSED = r"has no second derivative .* HF_HYBRID_SSM_BACKEND=reference"
REFUSED_BY_TORCH = r"derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"


def second_derivative(loss, points, directions):
    """d/dx of the sum of gradient · direction, for each point x."""
    gradients = torch.autograd.grad(loss(*points), points, create_graph=True, allow_unused=True)
    pairs = [(one, direction) for one, direction in zip(gradients, directions) if one is not None]
    return torch.autograd.grad(sum((one * direction).sum() for one, direction in pairs), points, allow_unused=True)


def differences(loss, points, directions):
    """The same by central differences of the gradient, in float64."""

    def gradients(shift):
        moved = [(p.detach().double() + shift * d.double()).requires_grad_() for p, d in zip(points, directions)]
        return torch.autograd.grad(loss(*moved), moved, allow_unused=True, materialize_grads=True)

    return [(ahead - back) / (2 * STEP) for ahead, back in zip(gradients(STEP), gradients(-STEP))]


def assert_right(found, wanted, tolerance):
    for one, expected in zip(found, wanted, strict=True):
        one = torch.zeros_like(expected) if one is None else one.double()
        torch.testing.assert_close(one, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1e-3))


def weighted(function):
    """A loss whose gradient with respect to the function's values is a constant: `once_differentiable` passes it."""

    def loss(*tensors):
        y = function(*tensors)
        return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()

    return loss


@pytest.mark.parametrize("implementation", [None, "torch", "reference"])
@pytest.mark.parametrize("case", OPS)
def test_of_ops(case, implementation):
    function, shapes = OPS[case]
    points, directions = [t.requires_grad_() for t in drawn(shapes)], drawn(shapes, 1)
    with backend("reference"):
        wanted = differences(weighted(function), points, directions)
    assert any(part.abs().max() > 1e-2 for part in wanted)
    with backend(implementation):
        try:
            found = second_derivative(weighted(function), points, directions)
        except RuntimeError as error:
            assert implementation != "reference"
            with pytest.raises(RuntimeError, match=REFUSED):
                raise error
        else:
            assert_right(found, wanted, 1e-4)


def test_with_respect_to_one_argument():
    """The error is there too where the gradient of a single argument is differentiated, by another."""
    hidden, weight = (t.requires_grad_() for t in drawn([(2, 9, 4), (7, 4)]))
    loss = OPS["linear_cross_entropy"][0]
    (gradient,) = torch.autograd.grad(loss(hidden, weight), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(gradient.sum(), hidden)
    (gradient,) = torch.autograd.grad(loss(hidden, weight), weight, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(hidden, weight), weight)[0])


# -- autograd functions -----------------------------------------------------------------------------------------------

NORM = RMSNorm(4)
# those of the package: a function of tensors that runs it, and their shapes; None: of processes, tests/distributed
FUNCTIONS = {
    "_ChunkedLinearCrossEntropy": OPS["linear_cross_entropy"],
    "_ChunkedLinearKL": OPS["linear_kl_divergence"],
    "_BiasedAttention": OPS["local_attention"],
    "_FFTConv": OPS["long_conv fft"],
    "_RMSNorm": (lambda x, w: torch.func.functional_call(NORM.to(x.dtype), {"weight": w}, (x,)), [(2, 9, 4), (4,)]),
    "_L2Normalise": (l2_normalise, [(2, 9, 4)]),
    "_Refusal": OPS["linear_cross_entropy"],
    "_Send": None,
    "_Receive": None,
    "_AttachBackward": None,
}


def functions_of_the_package() -> set[str]:
    for module in pkgutil.walk_packages(hf_hybrid_ssm.__path__, "hf_hybrid_ssm."):
        if not any(part in module.name for part in ("vllm", "triton", "__main__", "lm_eval")):
            importlib.import_module(module.name)
    waiting, found = [torch.autograd.Function], set()
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith("hf_hybrid_ssm."):
                found.add(kind.__name__)
    return found


def test_every_autograd_function_is_here():
    assert functions_of_the_package() == set(FUNCTIONS)


@pytest.mark.parametrize("name", [name for name, case in FUNCTIONS.items() if case is not None])
def test_of_autograd_functions(name):
    """In float64 and with the torch backend, where these run."""
    function, shapes = FUNCTIONS[name]
    points, directions = [t.double().requires_grad_() for t in drawn(shapes)], drawn(shapes, 1)
    with backend("torch"):
        wanted = differences(weighted(function), points, directions)
        if name in ("_ChunkedLinearCrossEntropy", "_ChunkedLinearKL", "_Refusal"):
            with pytest.raises(RuntimeError, match=REFUSED):
                second_derivative(weighted(function), points, directions)
        else:
            assert_right(second_derivative(weighted(function), points, directions), wanted, 1e-6)


# -- models -----------------------------------------------------------------------------------------------------------


# the states that a memory holds are constants to a gradient, but not to differences of gradients
@pytest.mark.parametrize("variant", [variant for variant in EVERY if variant != "bst with memory"])
def test_of_models(variant):
    """Along a direction in the space of all parameters; the loss is ours, since transformers' is float32."""
    plain = build(variant)
    for module in plain.modules():
        if hasattr(module, "stop_gradient"):  # what is held back once, as in a memory, would be missing in differences
            module.stop_gradient = False
    exact = copy.deepcopy(plain).double()
    if EVERY[variant][0] == STUDENTS:  # whose norms and angles are float32
        exactly(exact)
    inputs = inputs_for(exact, length=10)

    def loss(model):
        logits = model(**inputs).logits
        return logits.flatten(0, -2).log_softmax(-1)[:, 1].mean()

    generator = torch.Generator().manual_seed(0)
    directions = [
        torch.randn(p.shape, generator=generator, dtype=torch.float64) / p.numel() ** 0.5 for p in exact.parameters()
    ]

    def product(model):
        trained = [(p, d.to(p)) for p, d in zip(model.parameters(), directions, strict=True) if p.requires_grad]
        found = second_derivative(lambda *_: loss(model), *zip(*trained, strict=True))
        return sum(float((a * d).sum()) for a, (_, d) in zip(found, trained, strict=True) if a is not None)

    def slope(shift):
        model = copy.deepcopy(exact)
        pairs = [(p, d) for p, d in zip(model.parameters(), directions, strict=True) if p.requires_grad]
        with torch.no_grad():
            for parameter, direction in pairs:
                parameter.add_(direction, alpha=shift)
        loss(model).backward()
        return sum(float((p.grad * d).sum()) for p, d in pairs if p.grad is not None)

    with backend("reference"), sdpa_kernel(SDPBackend.MATH):  # Longhorn's hybrids have transformers' attention
        wanted = (slope(1e-6) - slope(-1e-6)) / 2e-6  # few activations change side within
        assert product(exact) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    for model in (exact, plain):
        try:
            found = product(model)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=f"{REFUSED}|{REFUSED_BY_TORCH}"):
                raise error
        else:
            assert found == pytest.approx(wanted, rel=1e-2, abs=1e-3)
