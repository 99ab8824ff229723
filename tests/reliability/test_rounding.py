"""Large relative differences that were seen between float32 (or bfloat16) and float64, and what they are."""

import copy

import pytest
import torch

from hf_hybrid_ssm.layers.mixers.registry import build_mixer
from hf_hybrid_ssm.ops.core.dispatch import REGISTRY
from hf_hybrid_ssm.ops.implicit_attention import implicit_attention
from tests.tiny_models import own_language_model


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("length", [64, 1024])
@pytest.mark.parametrize("slower", [0.0, 3.0])
def test_gradients_of_s4_follow_the_powers_of_its_matrix(length, slower):
    """The dense powers of S4 are float32 in training, so that errors grow with the length: to some 1e-5 of a gradient.

    A SPADE was off by 0.4 %, in the feed-forward: one rectified unit whose input was 1.1e-7, computed to 1e-6, was on
    the other side of 0. With a smooth activation the same model is off by 3e-5.
    """
    torch.manual_seed(0)
    mixer = build_mixer("s4", 16, state_size=64)
    with torch.no_grad():
        mixer.A_log_real.sub_(slower)
    exact = copy.deepcopy(mixer).double()
    u, weights = torch.randn(2, 2, length, 16)
    (mixer(u)[0] * weights).sum().backward()
    (exact(u.double())[0] * weights.double()).sum().backward()
    errors = {name: relative(p.grad, exact.get_parameter(name).grad) for name, p in mixer.named_parameters()}
    assert max(errors.values()) < 1e-4, errors


def test_gradients_of_two_tokens():
    """Of two tokens only the first predicts one, and it sees itself alone: its queries and keys have no gradient, and
    what float32 has there is rounding, eager or compiled. The others agree with float64."""
    model = own_language_model("longhorn + window and full attention").train()
    exact = copy.deepcopy(model).double()
    ids = torch.tensor([[5, 7], [11, 13]])
    for each in (model, exact):
        each(ids, labels=ids, use_cache=False).loss.backward()
    largest = max(float(p.grad.abs().max()) for p in exact.parameters())
    nothing = {name for name, p in exact.named_parameters() if float(p.grad.abs().max()) < 1e-12 * largest}
    assert nothing and all(name.endswith(("q_proj.weight", "k_proj.weight")) for name in nothing)
    for name, parameter in model.named_parameters():
        wanted = exact.get_parameter(name).grad
        if name in nothing:
            assert float(parameter.grad.abs().max()) < 1e-6 * largest
        else:
            assert relative(parameter.grad, wanted) < 2e-5, name


@pytest.mark.parametrize("largest", [1, 30])
def test_implicit_attention_in_bfloat16(largest):
    """Logits are products of two sums over the window, so that they grow with the square of the inputs: at 30 a
    rounding of the inputs alone changes the output by percents. The C kernel computes in float32; torch rounds what
    the memory reads out, and the logits, and is off by a few times as much."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 200, 32, generator=generator)
    x = (largest * x / x.abs().max()).bfloat16()
    weight = (torch.randn(3, 4, 10, generator=generator) / 3).bfloat16()
    collapse = torch.randn(4, generator=generator).bfloat16()

    def run(x, backend):
        dtype = x.dtype
        return implicit_attention(x, weight.to(dtype), None, collapse.to(dtype), None, theta=20.0, backend=backend)[0]

    exact = run(x.double(), "reference")
    noise = 2**-9 * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)
    of_rounding = relative(run(x.double() * (1 + noise), "reference"), exact)
    assert (of_rounding > 0.01) == (largest == 30)
    assert relative(run(x, "torch"), exact) < 5 * of_rounding
    if REGISTRY["implicit_attention"].unavailable("native", "cpu", torch.bfloat16) is None:
        assert relative(run(x, "native"), exact) < 2**-8
