"""Models are built as ever where DeepSpeed partitions parameters meanwhile.

DeepSpeed itself is asked by `tests/matrix/test_sharded_training.py`.
"""

import copy
import sys
import types

import pytest
import torch
from _lib.runs import parameters_of
from torch import nn

from hf_hybrid_ssm.layers.mixers.registry import BUILT_IN, build_mixer
from hf_hybrid_ssm.layers.plain_tensors import plain_tensors
from hf_hybrid_ssm.students.initial import student_of
from hf_hybrid_ssm.students.memory import _copied
from hf_hybrid_ssm.training.optim import MuonAdamW, parameter_groups
from hf_hybrid_ssm.training.warm_start import copy_embeddings
from tests.students.teachers import teacher
from tests.tiny_models import own_language_model

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

    context = types.SimpleNamespace(patched=False)

    def restore():
        assert not context.patched
        context.patched = True
        for name, make in plain.items():
            setattr(torch, name, patched(make))

    def shutdown():
        context.patched = False
        for name, make in plain.items():
            setattr(torch, name, make)

    zero = types.SimpleNamespace(
        shutdown_init_context=shutdown, restore_init_context=restore, top_level_context=context
    )
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


def test_one_in_another_leaves_it_left(partitioned):
    with plain_tensors():
        with plain_tensors():
            pass
        assert torch.ones(1, dtype=torch.float64).dtype == torch.float64
    assert torch.ones(1, dtype=torch.float64).dtype == torch.float32


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
    partition(norm)
    assert _copied(norm).weight.shape == (6,) and norm.weight.numel() == 0


def partition(module):
    """As DeepSpeed leaves a module: of each parameter nothing but its shape."""
    for parameter in module.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    return module


@pytest.mark.parametrize("variant", ["longhorn", "spade s4 trained", "student: groups"])
def test_groups_and_sizes_are_those_of_whole_parameters(variant):
    whole, model = own_language_model(variant), own_language_model(variant)
    sizes = [parameters_of(whole, **options) for options in ({}, {"beside_embeddings": True}, {"trained": True})]
    assert sizes[:2] == [whole.num_parameters(), whole.num_parameters(exclude_embeddings=True)]
    partition(model)
    assert sizes == [
        parameters_of(model, **options) for options in ({}, {"beside_embeddings": True}, {"trained": True})
    ]
    decays, found = (
        {id_of[id(p)]: group["weight_decay"] for group in parameter_groups(one, 0.1) for p in group["params"]}
        for one in (whole, model)
        if (id_of := {id(p): name for name, p in one.named_parameters()})
    )
    assert decays == found and set(decays.values()) == {0.0, 0.1}


def test_what_needs_whole_weights_refuses_parts():
    model = partition(own_language_model("longhorn"))
    with pytest.raises(ValueError, match="MuonAdamW: DeepSpeed"):
        MuonAdamW(model)
    with pytest.raises(ValueError, match="model: DeepSpeed"):
        copy_embeddings(model, own_language_model("longhorn"))
    with pytest.raises(ValueError, match="teacher: DeepSpeed"):
        student_of(partition(copy.deepcopy(teacher("qwen3"))))
