"""Nothing that a mixer computed from its parameters outlives them, however they change."""

import pytest
import torch
from torch.func import functional_call

from hf_hybrid_ssm.layers.mixers.cached_kernel import CachedKernelMixer, mark_of
from tests.layers.mixer_cases import (
    FROZEN,
    D,
    L,
    build,
    every_case,
    every_side,
    parts,
    shown_mixer_has_a_name,  # noqa: F401
    tokens,
)
from tests.row_options import mix, one_token, unread_token
from tests.tiny_models import compiles
from tests.weight_changes import WAYS, changed_values


def outputs(mixer) -> list[torch.Tensor]:
    """What a mixer computes without autograd: rows, and where it looks back only a state, a step and an update."""
    dtype = next(mixer.parameters()).dtype
    u = tokens(2, L, D, dtype=dtype)
    if mixer.bidirectional:
        return [mixer(u)[0]]
    y, state = mix(mixer, u, return_final_state=True)
    y_t, after = one_token(mixer, u[:, 0], state)
    copies = tuple(part.clone() for part in state) if isinstance(state, tuple) else state.clone()
    updated = unread_token(mixer, u[:, 0], copies)
    return [y, *parts(state), y_t, *parts(after), *parts(updated)]


def assert_fresh(mixer, case, bidirectional, before=None):
    """The mixer computes what a new one with its weights does, which is not what it computed `before`."""
    other = build(case, bidirectional)
    other.load_state_dict(mixer.state_dict())
    now, wanted = outputs(mixer), outputs(other)
    for a, b in zip(now, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert before is None or not torch.equal(before[0], now[0])


@every_case
@torch.no_grad()
def test_every_way_of_changing_the_weights_is_seen(case):
    for seed, (way, change) in enumerate(WAYS.items()):
        if way == "swap_tensors" and "lstm" in case:
            continue  # torch refuses it, since `nn.LSTM` keeps weak references
        mixer = build(case)
        before = outputs(mixer)
        values = changed_values(mixer, seed)
        change(mixer, values)
        for name, value in values.items():
            torch.testing.assert_close(mixer.get_parameter(name).detach(), value, msg=way)
        assert_fresh(mixer, case, False, before)


@every_side
@torch.no_grad()
def test_every_parameter_counts(case, bidirectional):
    mixer = build(case, bidirectional)
    before = outputs(mixer)
    for name, value in changed_values(mixer).items():
        mixer.get_parameter(name).data.copy_(value)
        assert_fresh(mixer, case, bidirectional, before)
        before = outputs(mixer)


@every_side
@torch.no_grad()
def test_substituted_parameters_are_used_for_their_call_only(case, bidirectional):
    mixer, other = (build(case, bidirectional) for _ in range(2))
    before, values = outputs(mixer), changed_values(mixer)
    other.load_state_dict(values)
    u = tokens(2, L, D)
    torch.testing.assert_close(functional_call(mixer, values, (u,))[0], outputs(other)[0], rtol=1e-12, atol=1e-12)
    for a, b in zip(outputs(mixer), before, strict=True):
        assert torch.equal(a, b)


@every_case
@torch.no_grad()
def test_casts_and_resets_are_seen(case):
    mixer = build(case)
    before = outputs(mixer)
    mixer.reset_parameters()
    assert_fresh(mixer, case, False, before)
    mixer.float()
    outputs(mixer)
    mixer.double()
    assert_fresh(mixer, case, False)


@every_side
def test_training_drops_what_evaluation_kept(case, bidirectional, monkeypatch):
    """On a GPU, where values are not compared and FSDP writes without a trace: a training step drops everything."""
    mixer = build(case, bidirectional)
    mixer.requires_grad_(True)
    with torch.no_grad():
        before = outputs(mixer)
    mixer(tokens(1, 9, D))[0].sum().backward()
    for module in mixer.modules():
        if isinstance(module, CachedKernelMixer):
            monkeypatch.setattr(module, "_clear_if_changed", lambda tensors: None)
    with torch.no_grad():
        for name, value in changed_values(mixer).items():
            mixer.get_parameter(name).data.copy_(value)
        assert_fresh(mixer, case, bidirectional, before)


@every_case
@torch.no_grad()
def test_elsewhere_clearing_is_in_reach(case, monkeypatch):
    """As on a GPU: a write through `.data` is not seen there, and `clear_kernel_cache` mends it."""
    monkeypatch.setattr("hf_hybrid_ssm.layers.mixers.cached_kernel.mark_of", lambda tensor: _SeesNothing())
    mixer = build(case)
    before = outputs(mixer)
    for name, value in changed_values(mixer).items():
        mixer.get_parameter(name).data.copy_(value)
    for module in mixer.modules():
        if hasattr(module, "clear_kernel_cache"):
            module.clear_kernel_cache()
    assert_fresh(mixer, case, False, before)


@compiles
@pytest.mark.parametrize("way", ["foreach", "data = strided tensor", "load_state_dict", "setattr"])
@pytest.mark.parametrize("case", [case for case in FROZEN if "shown" not in case] + ["s4"])  # which is in no module
@torch.no_grad()
def test_compiled_programs_use_no_kernel_of_other_weights(case, way):
    """They compute from the weights as they are, or refuse; the plain mixer too, where only the program ran before."""
    u = tokens(2, L, D)
    for runs_before in (False, True):
        torch.compiler.reset()
        mixer, other = build(case), build(case)
        compiled = torch.compile(mixer, backend="eager")
        if runs_before:
            mixer(u)
        before = compiled(u)[0]
        compiled(u)
        WAYS[way](mixer, changed_values(mixer))
        other.load_state_dict(mixer.state_dict())
        wanted = other(u)[0]
        assert not torch.allclose(before, wanted)
        keeps = any(isinstance(module, CachedKernelMixer) for module in mixer.modules()) and case in FROZEN
        if keeps and way in ("foreach", "data = strided tensor"):
            with pytest.raises(RuntimeError, match="frozen parameters were written in place"):
                compiled(u)
            if runs_before:
                for module in mixer.modules():
                    if hasattr(module, "clear_kernel_cache"):
                        module.clear_kernel_cache()
                torch.testing.assert_close(compiled(u)[0], wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mixer(u)[0], wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(compiled(u)[0], wanted, rtol=1e-12, atol=1e-12)


class _SeesNothing:
    copy = torch.zeros(1)

    def has_changed(self, tensor) -> bool:
        return False


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4),
        lambda: torch.randn(4, 3).T,
        lambda: torch.randn(3, 4, dtype=torch.bfloat16),
        lambda: torch.view_as_complex(torch.randn(3, 4, 2)).conj().imag,  # a lazy negation
        lambda: torch.full((2, 2), float("nan")),
    ],
    ids=["float32", "transposed", "bfloat16", "negated view", "nan"],
)
def test_marks_see_a_single_number(make):
    tensor = make()
    mark = mark_of(tensor)
    assert not mark.has_changed(tensor) and not mark.has_changed(tensor.clone(memory_format=torch.preserve_format))
    version = tensor._version
    tensor.data[1, 1] = 7
    assert tensor._version == version and mark.has_changed(tensor)
    assert mark_of(tensor).has_changed(tensor.double() if tensor.dtype != torch.float64 else tensor.float())
    assert mark_of(torch.empty(0)).has_changed(tensor) and not mark_of(torch.empty(0)).has_changed(torch.empty(0))
