"""Models are built as ever where DeepSpeed partitions parameters meanwhile.

DeepSpeed itself is asked by `tests/matrix/test_sharded_training.py`.
"""

import sys
import types

import pytest
import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.registry import BUILT_IN, build_mixer
from hf_hybrid_ssm.layers.plain_tensors import plain_tensors
from hf_hybrid_ssm.students.memory import _copied

CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")


@pytest.fixture
def partitioned(monkeypatch):
    """What `deepspeed.zero.Init` does to torch: everything with a point has the dtype of the parameters."""
    plain = {name: getattr(torch, name) for name in CONSTRUCTORS}

    def patched(make):
        def made(*args, **options):
            tensor = make(*args, **options)
            return tensor.float() if tensor.is_floating_point() else tensor

        return made

    def restore():
        for name, make in plain.items():
            setattr(torch, name, patched(make))

    def shutdown():
        for name, make in plain.items():
            setattr(torch, name, make)

    zero = types.SimpleNamespace(shutdown_init_context=shutdown, restore_init_context=restore)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.partition_parameters", zero)
    restore()
    yield
    shutdown()


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_initial_values_are_computed_in_float64(name, request):
    torch.manual_seed(0)
    wanted = build_mixer(name, 6).state_dict()
    request.getfixturevalue("partitioned")
    torch.manual_seed(0)
    found = build_mixer(name, 6).state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[part], wanted[part]) for part in wanted)
    assert torch.ones(1, dtype=torch.float64).dtype == torch.float32  # the context goes on


def test_it_goes_on_after_an_error(partitioned):
    with pytest.raises(ZeroDivisionError), plain_tensors():
        assert torch.ones(1, dtype=torch.float64).dtype == torch.float64
        1 / 0  # noqa: B018
    assert torch.ones(1, dtype=torch.float64).dtype == torch.float32


def test_a_mixer_is_built_where_nothing_is_drawn(monkeypatch):
    """transformers draws after it has built, and torch's functions do nothing until then."""
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda tensor, **options: None)
    assert build_mixer("s5", 6, state_size=8).state_dict()["B"].shape


def test_a_copy_of_a_norm_is_whole_where_a_part_of_it_lies_here():
    norm = nn.RMSNorm(6)
    assert torch.equal(_copied(norm).weight, norm.weight) and _copied(norm).weight is not norm.weight
    norm.weight.data, norm.weight.ds_shape = torch.empty(0), torch.Size([6])
    assert _copied(norm).weight.shape == (6,) and norm.weight.numel() == 0
