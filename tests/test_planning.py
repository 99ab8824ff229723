"""The plan of a training step against what small models of every family really hold and compute."""

import contextlib
import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from hf_hybrid_ssm.ops.dispatch import backend
from hf_hybrid_ssm.planning import Setup, plan
from hf_hybrid_ssm.planning.__main__ import main
from hf_hybrid_ssm.planning.decoding import cache_bytes
from hf_hybrid_ssm.planning.presets import preset_config, preset_names
from tests.small_models import CASES, SIZES, SPADE, STILL, VOCABULARY, built

BATCH, LENGTH = 4, 192
WITHIN = 1.3
EVERY_CASE = pytest.mark.parametrize("case", CASES)


def batch_for(model, rows=BATCH):
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    if "Classification" in type(model).__name__:
        return {"input_ids": ids, "labels": torch.zeros(rows, dtype=torch.int64)}
    return {"input_ids": ids, "labels": ids}


def setup_for(**fields):
    return Setup(batch=BATCH, length=LENGTH, **fields)


def bytes_kept(model, inputs):
    """Bytes of what autograd saves in a forward, weights apart, each storage once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor

    model(**inputs)  # constants that a model computes once are no activations
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def log_softmax_bytes(model):
    """What of the logits the forward keeps for the backward; a plan counts all that stands at once."""
    return 0 if "Classification" in type(model).__name__ else BATCH * LENGTH * VOCABULARY * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
@EVERY_CASE
def test_activations(case, dtype):
    mixed = dtype == "mixed"
    dtype = "float32" if mixed else dtype
    model = built(case, getattr(torch, dtype))
    with backend("torch"), torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        measured = bytes_kept(model, batch_for(model)) - log_softmax_bytes(model)
    found = plan(model.config, setup_for(dtype=dtype, mixed=mixed, kernels="torch")).memory
    assert 1 / WITHIN < (found["activations"] + found["casts"]) / measured < WITHIN
    assert bool(found["casts"]) == mixed


@EVERY_CASE
def test_activations_with_checkpointing(case):
    """What stays is the input of each layer; what comes back is at most the layer that keeps most."""
    model = built(case)
    inputs = batch_for(model)
    with backend("torch"):
        whole = bytes_kept(model, inputs)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        measured = bytes_kept(model, inputs) - log_softmax_bytes(model)
    planned = plan(model.config, setup_for(kernels="torch", checkpointing=True)).memory
    assert 1 / WITHIN < planned["activations"] / measured < WITHIN
    layers = len([module for module in model.modules() if type(module).__name__ in model._no_split_modules])
    given_up = whole - log_softmax_bytes(model) - measured
    assert given_up / layers / WITHIN < planned["recomputed"] < given_up * WITHIN


@pytest.mark.parametrize("case", ["longhorn", "longhorn hybrid", "spade", "lmu_isa global", "spade_seq2seq"])
def test_activations_of_fused_kernels(case):
    """Without dropout, attention on CPUs keeps no scores; Longhorn's scan is the C kernel."""
    model = built(case, **STILL if "spade" in case else {})
    with contextlib.nullcontext() if "longhorn" in case else backend("torch"):
        measured = bytes_kept(model, batch_for(model)) - log_softmax_bytes(model)
    planned = plan(model.config, setup_for(kernels="fused")).memory["activations"]
    assert 1 / WITHIN < planned / measured < WITHIN
    if case == "longhorn":
        assert planned < 0.8 * plan(model.config, setup_for(kernels="torch")).memory["activations"]


@EVERY_CASE
def test_weights_and_optimizer(case):
    """Parameters, gradients and the state of AdamW, to the byte, in float32 and in bfloat16."""
    for dtype in ("float32", "bfloat16"):
        model = built(case, getattr(torch, dtype))
        optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
        model(**batch_for(model, rows=1)).loss.backward()
        for parameter in model.parameters():  # a parameter that a forward does not reach has no gradient yet
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        found = plan(model.config, setup_for(dtype=dtype)).memory
        assert found["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
        assert found["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert found["optimizer"] == sum(tensor.nbytes for tensor in states)


@pytest.mark.parametrize("case", ["longhorn", "spade", "bst sh", "lmu_isa", "spade_seq2seq"])
def test_shards(case):
    """FSDP2's own shards on the first of five devices, to the byte."""
    model = built(case)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=5)
    try:
        for module in [*(m for m in model.modules() if type(m).__name__ in model._no_split_modules), model]:
            fully_shard(module, mesh=init_device_mesh("cpu", (5,)))
        held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
    found = plan(model.config, setup_for(gpus=5, sharding="fsdp2"))
    assert found.memory["parameters"] == held < plan(model.config, setup_for(gpus=5)).memory["parameters"] / 2


def counted_flops(model, backward):
    # torch counts matrix products and convolutions, but not the CPU's fused attention
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), backend("torch"):
        loss = model(**batch_for(model)).loss
        if backward:
            loss.backward()
    return counter.get_total_flops()


@EVERY_CASE
def test_flops(case):
    """Matrix products within 3 %; what a counter of products does not see is left out."""
    model = built(case)
    model(**batch_for(model))  # constant filters are made once
    found = plan(model.config, setup_for())
    seen = {kind: count for kind, count in found.flops_per_token.items() if kind != "recurrence"}
    tokens = BATCH * LENGTH
    forward = sum(seen.values()) * tokens + found.flops_per_forward
    assert forward == pytest.approx(counted_flops(model, backward=False), rel=0.03)
    unseen = 3 * found.flops_per_token["recurrence"] * tokens
    assert found.flops_per_step - unseen == pytest.approx(counted_flops(model, backward=True), rel=0.03)
    again = plan(model.config, setup_for(checkpointing=True)).flops_per_step - unseen * 4 / 3
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert 0.9 * again < counted_flops(model, backward=True) < 1.03 * again


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in CASES if "classifier" not in case])
def test_decoding_state(case, dtype):
    """The cache that a forward returns, to the byte, below and beyond the window."""
    model = built(case, getattr(torch, dtype)).eval()
    for length in (7, LENGTH):
        ids = torch.full((1, length), 5)
        targets = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            cache = model(ids, use_cache=True, **targets).past_key_values
        planned = plan(model.config, dataclasses.replace(setup_for(dtype=dtype), length=length))
        assert planned.state == cache_bytes(cache) > 0


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_plan(name):
    found = plan(preset_config(name), Setup(mixed=True, checkpointing=True, sharding="fsdp2", gpus=4))
    assert found.parameters >= found.trainable > 0 and found.flops_per_step > 0
    assert found.total > 4 * found.trainable  # a quarter each of weights, gradients and two moments, in float32
    plain = plan(preset_config(name), Setup(mixed=True))
    assert plain.memory["activations"] > found.memory["activations"] + found.memory["recomputed"]


def test_command_line(capsys, tmp_path):
    main(["--preset", "longhorn/125m", "--gpus", "8", "--batch", "8", "--length", "1024", "--sharding", "fsdp2"])
    said = capsys.readouterr().out
    found = plan(preset_config("longhorn/125m"), Setup(gpus=8, sharding="fsdp2"))
    assert f"{found.parameters:,} parameters" in said and "gathered" in said and "buckets" not in said
    with pytest.raises(SystemExit):
        main(["--preset", "longhorn/1"])
    assert "has no preset '1'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--preset", "longhorn/125m", "--all", str(tmp_path / "page.md")])


def test_refusals():
    with pytest.raises(ValueError, match="batch=0 must be at least 1"):
        Setup(batch=0)
    with pytest.raises(ValueError, match="sharding='zero' must be one of 'ddp', 'fsdp2'"):
        Setup(sharding="zero")
    with pytest.raises(ValueError, match="mixed=True keeps the weights in float32"):
        Setup(mixed=True, dtype="bfloat16")
    config = AutoConfig.for_model("spade", **SIZES | SPADE, ssm_type="hyena")
    with pytest.raises(ValueError, match="'hyena' is not planned for"):
        plan(config)
