"""Parameters of mixers that something stands in front of: parametrizations (as PEFT's `target_parameters` use them)
and forward hooks (as `torch.nn.utils.prune` uses them)."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.layers.mixer_cases import (
    CASES,
    D,
    L,
    assert_near,
    assert_states,
    build,
    every_side,
    parts,
    shown_mixer_has_a_name,  # noqa: F401
    tokens,
)
from tests.row_options import mix, one_token


class Times(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return 1.0 * value


def owners(mixer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Module and name of each of the mixer's parameters."""
    split = (name.rpartition(".") for name, _ in mixer.named_parameters())
    return [(mixer.get_submodule(path), leaf) for path, _, leaf in split]


@every_side
def test_a_parametrized_parameter_trains(case, bidirectional):
    """Base frozen, one parameter behind a parametrization: the gradient of an ordinary parameter, for each."""
    u, weights = tokens(2, L, D), tokens(2, L, D, seed=9)

    def loss(mixer):
        y = mixer(u)[0]
        return (y.flatten(2) * weights.repeat(1, 1, y.flatten(2).shape[-1] // D)).sum()

    plain = build(case, bidirectional)
    plain.requires_grad_(True)
    loss(plain).backward()
    for index, (module, name) in enumerate(owners(plain)):
        mixer = build(case, bidirectional).requires_grad_(False)
        owner = owners(mixer)[index][0]
        with torch.no_grad():
            mixer(u)
        parametrize.register_parametrization(owner, name, Times())
        original = owner.parametrizations[name].original.requires_grad_(True)
        loss(mixer).backward()
        assert original.grad is not None, name
        assert_near(original.grad, getattr(module, name).grad)


def evaluated(mixer: nn.Module) -> list[torch.Tensor]:
    u = tokens(2, L, D)
    with torch.no_grad():
        if mixer.bidirectional:
            return [mixer(u)[0]]
        y, state = mix(mixer, u, return_final_state=True)
        y_t, after = one_token(mixer, u[:, 0], state)
    return [y, *parts(state), y_t, *parts(after)]


@every_side
def test_a_parametrized_parameter_is_never_stale(case, bidirectional):
    """All parameters behind parametrizations, in evaluation: rows and steps follow what is written into them."""
    mixer, other = (build(case, bidirectional) for _ in range(2))
    wanted = owners(mixer)
    for module, name in wanted:
        parametrize.register_parametrization(module, name, Times())
    assert_states(tuple(evaluated(mixer)), tuple(evaluated(other)))
    for (module, name), (other_module, _) in zip(wanted, owners(other), strict=True):
        with torch.no_grad():
            module.parametrizations[name].original.data.mul_(1.25)
            getattr(other_module, name).mul_(1.25)
        assert_states(tuple(evaluated(mixer)), tuple(evaluated(other)))
    for module, name in wanted:
        parametrize.remove_parametrizations(module, name)
    assert_states(tuple(evaluated(mixer)), tuple(evaluated(other)))


@pytest.mark.parametrize("case", [case for case in CASES if "lstm" not in case])
def test_a_pruned_parameter_trains(case):
    """`prune` leaves the product of a mask and the parameter where the parameter was."""
    mixer, plain = build(case).requires_grad_(True), build(case).requires_grad_(True)
    y = plain(tokens(2, L, D))[0]
    y.square().sum().backward()
    index = len(owners(mixer)) // 2
    (owner, name), (plain_owner, _) = owners(mixer)[index], owners(plain)[index]
    mixer.requires_grad_(False)
    prune.custom_from_mask(owner, name, torch.ones_like(getattr(owner, name)))
    getattr(owner, f"{name}_orig").requires_grad_(True)
    assert_near(mixer(tokens(2, L, D))[0], y)
    mixer(tokens(2, L, D))[0].square().sum().backward()
    assert_near(getattr(owner, f"{name}_orig").grad, getattr(plain_owner, name).grad)


@pytest.mark.parametrize("case", CASES)
def test_casts_keep_the_precision_behind_a_parametrization(case):
    mixer = build(case, dtype=torch.float32)
    kept = [(module, name) for module, name in owners(mixer) if name in getattr(module, "float32_parameters", ())]
    for module, name in kept:
        parametrize.register_parametrization(module, name, Times())
    mixer.to(torch.bfloat16)
    assert all(getattr(module, name).dtype == torch.float32 for module, name in kept)
    assert kept or case.startswith(("lstm", "shown"))
