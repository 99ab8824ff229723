from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM
from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.registry import MIXERS
from hf_hybrid_ssm.training.optim import MuonAdamW, parameter_groups
from tests.tiny_models import CASES, EVERY, build, built


def tiny_longhorn(**options):
    return LonghornForCausalLM(LonghornConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, **options))


def test_longhorn_decays_exactly_the_tensors_of_two_and_more_dimensions():
    model = tiny_longhorn()
    decayed, kept = parameter_groups(model, 0.1, lr=1e-3)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert decayed["lr"] == kept["lr"] == 1e-3
    assert {id(p) for p in decayed["params"]} == {id(p) for p in model.parameters() if p.dim() >= 2}
    assert {id(p) for p in kept["params"]} == {id(p) for p in model.parameters() if p.dim() < 2}


@pytest.mark.parametrize("case", ["spade", "bst sh", "spade_seq2seq"])
def test_relative_biases_do_not_decay(case):
    model = built(case)
    biases = {id(p) for name, p in model.named_parameters() if "relative_bias" in name}
    decayed, *others = parameter_groups(model, 0.1)
    assert biases and decayed["weight_decay"] == 0.1 and {group["weight_decay"] for group in others} == {0.0}
    assert not biases & {id(p) for p in decayed["params"]}
    assert biases <= {id(p) for group in others for p in group["params"]}


def test_tied_weights_appear_once_and_frozen_ones_not_at_all():
    model = tiny_longhorn(tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    listed = [id(p) for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters() if p.requires_grad}
    assert id(model.lm_head.weight) in listed


def test_options_of_a_parameter_win():
    model = nn.Linear(3, 3)
    model.weight._optim = {"lr": 1e-4, "weight_decay": 0.0}
    own, rest = parameter_groups(model, 0.1, lr=1e-2)
    assert own == {"params": [model.weight], "weight_decay": 0.0, "lr": 1e-4}
    assert rest == {"params": [model.bias], "weight_decay": 0.0, "lr": 1e-2}


def test_options_of_a_module_win_where_a_parameter_was_replaced():
    """As FSDP does: a shard is a parameter of its own, without the attributes of the whole."""
    mixer = MIXERS["s4"](4, trainable="all", learning_rate=1e-4)
    expected = [{**group, "params": len(group["params"])} for group in parameter_groups(mixer, 0.1, lr=1e-2)]
    for name, parameter in list(mixer.named_parameters()):
        mixer._parameters[name] = nn.Parameter(parameter.detach().clone())
    found = [{**group, "params": len(group["params"])} for group in parameter_groups(mixer, 0.1, lr=1e-2)]
    assert found == expected and {group["lr"] for group in found} == {1e-4, 1e-2}


@pytest.mark.parametrize("ssm_type", ["s4", "s4d", "s5", "ema", "hyena", "unstructured"])
def test_filters_do_not_decay_and_have_their_own_rate(ssm_type):
    """Of each trained filter, its own parameters never decay; those that make the filter have the given rate."""
    mixer = MIXERS[ssm_type](8, learning_rate=1e-4)
    filters = [module for module in mixer.modules() if isinstance(module, Mixer) and module.dynamics_parameters]
    assert len(filters) == 1
    own = dict(filters[0].named_parameters(recurse=False))
    groups = parameter_groups(mixer, 0.1, lr=1e-2)
    found = {id(parameter): (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]}
    for name, parameter in own.items():
        assert found[id(parameter)] == (1e-2 if name in filters[0].output_parameters else 1e-4, 0.0), name
    assert set(own) == {*filters[0].dynamics_parameters, *filters[0].output_parameters}


@pytest.mark.parametrize("case", CASES)
def test_biases_never_decay(case):
    """Whatever their shape: a stack of biases is not a matrix."""
    model = built(case)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {
        names[id(parameter)]
        for group in parameter_groups(model, 0.1)
        for parameter in group["params"]
        if group["weight_decay"]
    }
    assert decayed and not [name for name in decayed if "bias" in name.rpartition(".")[2]]
    if case == "lmu_isa":
        assert any(name.endswith("reduce_weight") for name in decayed)


def test_groups_step_and_restore():
    torch.manual_seed(0)
    model = tiny_longhorn()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1, lr=1e-2))
    before = model.lm_head.weight.detach().clone()
    ids = torch.randint(32, (2, 8))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert not torch.equal(before, model.lm_head.weight)
    again = torch.optim.AdamW(parameter_groups(model, 0.1, lr=1e-2))
    again.load_state_dict(optimizer.state_dict())
    assert len(again.state) == sum(1 for _ in model.parameters())


muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has Muon")


@muon
@pytest.mark.parametrize("variant", EVERY)
def test_muon_has_the_maps_between_hidden_states(variant):
    model = build(variant)
    maps = {id(module.weight) for module in model.base_model.modules() if isinstance(module, nn.Linear)}
    maps -= {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    given = [(id(p), group) for group in MuonAdamW(model).param_groups for p in group["params"]]
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert sorted(identity for identity, _ in given) == sorted(trained)
    assert {identity for identity, group in given if group["is_muon"]} == maps & trained
    expected = {id(p): group for group in parameter_groups(model, 0.1, lr=1e-3) for p in group["params"]}
    for identity, group in given:
        assert all(group[key] == expected[identity][key] for key in ("lr", "weight_decay"))


@muon
def test_muon_by_name():
    """Whatever is around the model, an adapter too."""
    model = build("longhorn untied").train()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    mixer = {f"mixer.{part}.weight" for part in ("in_proj", "x_proj", "dt_proj", "out_proj")}
    expected = {f"model.layers.{index}.{part}" for index in range(len(model.model.layers)) for part in mixer}
    for wrapped in (model, nn.Sequential(model), nn.DataParallel(model)):
        assert {names[identity] for identity in muons(MuonAdamW(wrapped))} == expected
    adapted = get_peft_model(model, LoraConfig(target_modules=["in_proj", "lm_head"]))
    names = {id(parameter): name for name, parameter in adapted.named_parameters()}
    found = {names[identity] for identity in muons(MuonAdamW(adapted))}
    assert len(found) == 2 * len(model.base_model.layers) and all(".in_proj.lora_" in name for name in found)


def muons(optimizer):
    return {id(p) for group in optimizer.param_groups if group["is_muon"] for p in group["params"]}


def trained(model, optimizers, steps, schedulers=(), begin=0):
    for step in range(begin, begin + steps):
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        model(ids, labels=ids).loss.backward()
        for one in (*optimizers, *schedulers):
            one.step()
        model.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def halved(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@muon
def test_muon_and_adamw_step_as_those_of_torch():
    torch.manual_seed(0)
    model = tiny_longhorn(tie_word_embeddings=False)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    matrices = [m.weight for m in model.model.modules() if isinstance(m, nn.Linear)]
    rest = [p for p in model.parameters() if not any(p is one for one in matrices)]
    groups = [{"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.1}]
    groups.append({"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0})
    apart = [
        torch.optim.Muon(matrices, 1e-2, 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, 1e-2, (0.9, 0.99)),
    ]
    expected = trained(model, apart, 3, [halved(one) for one in apart])
    model.load_state_dict(start)
    optimizer = MuonAdamW(model, 1e-2, betas=(0.9, 0.99))
    found = trained(model, [optimizer], 3, [halved(optimizer)])
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
        assert not torch.equal(found[name], start[name]), name


@muon
def test_muon_goes_on_from_its_state():
    torch.manual_seed(0)
    model = tiny_longhorn(tie_word_embeddings=False)
    optimizer = MuonAdamW(model, 1e-2)
    middle, state = trained(model, [optimizer], 2), deepcopy(optimizer.state_dict())
    expected = trained(model, [optimizer], 2, begin=2)
    model.load_state_dict(middle)
    again = MuonAdamW(model, 1e-3)
    again.load_state_dict(state)
    copied, copy_of_it = deepcopy((model, again))
    for one, its in ((model, again), (copied, copy_of_it)):
        found = trained(one, [its], 2, begin=2)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@muon
def test_muon_alone_and_a_further_group():
    layer, later = nn.Linear(3, 3, bias=False), nn.Parameter(torch.ones(3))
    optimizer = MuonAdamW(layer, 1e-2)
    optimizer.add_param_group({"params": [later], "lr": 1e-3})
    before = layer.weight.detach().clone()
    (layer(later) ** 2).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)
    torch.testing.assert_close(later, torch.ones(3), rtol=0, atol=2e-3)
    assert not torch.equal(later, torch.ones(3))


@muon
def test_muon_returns_the_loss_of_a_closure():
    layer = nn.Linear(3, 3)
    optimizer = MuonAdamW(layer)

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.ones(3)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)


@muon
def test_muon_refuses():
    with pytest.raises(ValueError, match=r"Embedding has no trained nn\.Linear"):
        MuonAdamW(nn.Embedding(3, 3))
    with pytest.raises(ValueError, match="lr=-1"):
        MuonAdamW(nn.Linear(2, 2), lr=-1)
    with pytest.raises(ValueError, match="momentum=1"):
        MuonAdamW(nn.Linear(2, 2), momentum=1.5)


def test_muon_of_an_older_torch(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ImportError, match="has no Muon"):
        MuonAdamW(nn.Linear(2, 2))


def test_bad_arguments():
    with pytest.raises(ValueError, match="weight_decay=-1"):
        parameter_groups(nn.Linear(2, 2), -1)
    with pytest.raises(ValueError, match="lr=-1"):
        parameter_groups(nn.Linear(2, 2), 0.1, lr=-1)
    with pytest.raises(ValueError, match="Linear has no parameter"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1)
