"""The plan of a training step against what small models of every family really hold and compute."""

import json
import time
from functools import cache
from importlib import import_module

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub.configurations import config_of_folder
from hf_hybrid_ssm.models import family_of
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.planning import Setup, plan
from hf_hybrid_ssm.planning.measurement import Measurement, cache_bytes, decoding_state_bytes, measure_step
from hf_hybrid_ssm.planning.operations import FORMULAS, Operations
from hf_hybrid_ssm.planning.presets import meta_model, preset_config
from hf_hybrid_ssm.planning.training_step import weights
from hf_hybrid_ssm.students.initial import student_config
from tests.students.teachers import TEACHERS, full_layers, teacher
from tests.tiny_models import (
    CASES,
    COMBINATIONS,
    EVERY,
    SIZES,
    VOCABULARY,
    WIDE_SPADE,
    WITHOUT_DROPOUT,
    built,
    classes_of,
    config_of,
)

BATCH, LENGTH = 4, 192
WITHIN = 0.05
UNSEEN = ("Fourier transforms",)
EVERY_CASE = pytest.mark.parametrize("case", CASES)


def batch_for(model, rows=BATCH):
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    if "Classification" in type(model).__name__:
        return {"input_ids": ids, "labels": torch.zeros(rows, dtype=torch.int64)}
    return {"input_ids": ids, "labels": ids}


def setup_for(**fields):
    return Setup(batch=BATCH, length=LENGTH, **fields)


@cache
def measured(case: str, setup: Setup) -> Measurement:
    """The step of a plan, once for all tests that ask the same of a case."""
    return measure_step(built(case).config, setup)


def activations(found: Measurement, dtype: str = "float32", mixed: bool = False) -> int:
    """What is saved: a plan also adds the logits themselves, and a float32 gradient of their log-probabilities."""
    added = BATCH * LENGTH * VOCABULARY * (4 + (4 if dtype == "float32" and not mixed else 2))
    return found.activations + (found.logits - added if found.logits else 0)


def bytes_kept(model, inputs):
    """Bytes of what autograd saves in a forward, weights apart, each storage once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor

    with torch.no_grad():
        model(**inputs)  # constants that a model computes once are no activations
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


# each family's default layers in every precision, its variants in one
FAMILIES = ("longhorn", "spade", "bst sh", "bst mf", "lmu_isa", "spade_seq2seq")
PRECISIONS = {
    "float32": CASES,
    "bfloat16": [*FAMILIES, "longhorn hybrid", "spade chunk", "bst brect"],
    "mixed precision": [*FAMILIES, "lmu_isa global", "spade classifier", "spade full, trained s4"],
}


@pytest.mark.parametrize("case, dtype", [(case, dtype) for dtype, cases in PRECISIONS.items() for case in cases])
def test_saved_bytes(case, dtype):
    """What real tensors keep: activations, and of the logits their log-probabilities."""
    mixed = dtype == "mixed precision"
    dtype = "float32" if mixed else dtype
    model = built(case, getattr(torch, dtype))
    with backend("torch"), torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        kept = bytes_kept(model, batch_for(model))
    found = measured(case, setup_for(dtype=dtype, mixed_precision=mixed, kernels="torch"))
    assert activations(found, dtype, mixed) == pytest.approx(kept, rel=WITHIN)


@EVERY_CASE
def test_saved_bytes_with_checkpointing(case):
    """What stays is the input of each layer; what comes back is at most the layer that keeps most."""
    model = built(case)
    inputs = batch_for(model)
    whole = measured(case, setup_for(kernels="torch"))
    found = measured(case, setup_for(kernels="torch", checkpointing=True))
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    with backend("torch"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        outside = bytes_kept(model, inputs)
    inputs_of_layers = len(layers) * BATCH * LENGTH * model.config.hidden_size * 4
    assert outside <= activations(found) <= outside + 1.1 * inputs_of_layers
    given_up = whole.activations - outside
    assert given_up / len(layers) / 1.3 < found.recomputed < whole.activations


def test_the_fused_scan_keeps_less():
    """Longhorn's scan in C keeps the states of some tokens only."""
    model = built("longhorn")
    kept, found = bytes_kept(model, batch_for(model)), measured("longhorn", setup_for())
    assert activations(found) == pytest.approx(kept, rel=WITHIN)
    assert found.activations < 0.8 * measured("longhorn", setup_for(kernels="torch")).activations


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
        found = weights(meta_model(model.config, dtype), setup_for(dtype=dtype))
        assert found["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
        assert found["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert found["optimizer"] == sum(tensor.nbytes for tensor in states)
        plain = weights(meta_model(model.config, dtype), setup_for(dtype=dtype, optimizer="sgd"))
        assert plain == {**found, "optimizer": 0}  # it keeps nothing


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
    found = weights(meta_model(model.config, "float32"), setup_for(gpus=5, sharding="fsdp2"))
    assert found["parameters"] == held < weights(meta_model(model.config, "float32"), setup_for())["parameters"] / 2


def counted_flops(model):
    """Of a forward, and of it with its backward."""
    # torch counts matrix products and convolutions; attention with a bias asks for the CPU's fused kernel by name
    fused = {op: formula for op, formula in FORMULAS.items() if "flash_attention_for_cpu" in str(op)}
    counter = FlopCounterMode(display=False, custom_mapping=fused)
    with counter, sdpa_kernel(SDPBackend.MATH), backend("torch"):
        loss = model(**batch_for(model)).loss
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


@EVERY_CASE
def test_flops(case):
    """Those of real tensors; Fourier transforms, which torch does not count, are left out."""
    model = built(case)
    model(**batch_for(model))  # filters that do not train are made once
    for checkpointing in (False, True):
        found = measured(case, setup_for(kernels="torch", checkpointing=checkpointing))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        forward, whole = counted_flops(model)
        seen = sum(count for kind, count in found.forward_flops.items() if kind not in UNSEEN)
        assert seen == pytest.approx(forward, rel=WITHIN)
        unseen = sum(found.forward_flops[kind] for kind in UNSEEN)
        # the CPU's fused attention computes its scores once more
        attention = found.forward_flops["attention"]
        assert whole * (1 - WITHIN) < found.step_flops < whole * (1 + WITHIN) + 4 * unseen + attention


def test_fourier_transforms_and_scans_are_counted():
    """2.5 n log2 n for a real transform of n points; nine operations for each number of the scan's state."""
    longhorn = built("longhorn").config
    scanned = measured("longhorn", setup_for()).forward_flops["recurrence"]
    assert (
        scanned == longhorn.num_hidden_layers * 9 * BATCH * LENGTH * longhorn.intermediate_size * longhorn.state_size
    )
    bst = built("bst sh").config
    scanned = measured("bst sh", setup_for()).forward_flops["recurrence"]
    assert scanned > 0 and scanned % (7 * BATCH * LENGTH * bst.hidden_size) == 0
    with FakeTensorMode(), Operations() as operations:
        torch.fft.irfft(torch.fft.rfft(torch.zeros(3, 64)))
        assert operations.counts.total() == 2 * 3 * 2.5 * 64 * 6
        torch.fft.ifft(torch.zeros(3, 64, dtype=torch.complex64))  # twice that, of numbers with two parts
    assert operations.counts.total() == 2 * 3 * 2.5 * 64 * 6 + 3 * 5 * 64 * 6


@pytest.mark.parametrize("window", [(3, 0), (3, -1), (2, 4), (2**40, 0), (2**40, 2**40)])
@pytest.mark.parametrize("held, chunk", [(0, 0), (5, 0), (0, 4), (0, 20)])
def test_window_attention_is_counted(window, held, chunk):
    """Multiplication and addition for each seen pair, in both products."""
    (left, right), length = window, 11
    chunked = min(left, chunk - 1) if chunk else left, min(right, chunk - 1) if chunk else right
    i, j = torch.arange(length).unsqueeze(1) + held, torch.arange(held + length)
    seen = (i - j <= left) & (j - i <= right)
    if chunk:
        seen &= i // chunk == j // chunk
    shapes = [(2, 6, length, 8), (2, 3, held + length, 8), (2, 3, held + length, 5)]
    import_module("hf_hybrid_ssm.ops.local_attention.native")  # which defines the op
    formula = flop_registry[torch.ops.hf_hybrid_ssm.local_attention_native]
    counted = formula(*shapes, *[None] * 6, 0.5, [*chunked, chunk, 0])
    assert counted == 2 * 2 * 6 * int(seen.sum()) * (8 + 5)


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
        assert decoding_state_bytes(model.config, [length], dtype, "fused") == [cache_bytes(cache)] > [0]


STUDENTS = {
    "full layers and groups": {"keep": [0, (3, 1)]},
    "windows": {},
    "first token": {"keep": [0], "sink": "first_token"},
    "memory beside": {"keep": [0], "memory": "longhorn"},
    "memory instead": {"memory": "longhorn", "instead": True},
    "contexts": {"memory": "context", "sink": None, "ssm_state_size": 4},
}
OTHER_TEACHERS = ["gemma3_text", "glm", "mixtral", *(["lfm2"] if "lfm2" in TEACHERS else [])]


def student_of_plan(name, kind) -> PreTrainedConfig:
    """Layers that a teacher has otherwise are not kept."""
    plan = STUDENTS[kind] | {"window": 5}
    if name != "llama":
        plan["keep"] = full_layers(name)[:1]
    return student_config(teacher(name).config, **plan)


@pytest.mark.parametrize(
    "name, kind", [("llama", kind) for kind in STUDENTS] + [(name, "windows") for name in OTHER_TEACHERS]
)
def test_decoding_state_of_students(name, kind):
    """Of every teacher, to the byte, below and beyond the window; keys and values of full layers alone grow."""
    config = student_of_plan(name, kind)
    model, sizes = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), []
    for length in (4, 11, 12):
        with torch.no_grad():
            sizes.append(cache_bytes(model(torch.full((1, length), 5), use_cache=True).cache))
    assert decoding_state_bytes(config, [4, 11, 12], "float32", "fused") == sizes and min(sizes) > 0
    groups = sum(2 if layer.attention == "full" else len(layer.groups) for layer in config.plan.layers)
    assert sizes[2] - sizes[1] == groups * 2 * 8 * 4  # a key and a value of eight channels in float32


def test_students_are_planned(tmp_path, capsys):
    config = student_of_plan("llama", "full layers and groups")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--batch", "2", "--length", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found["state"]] == decoding_state_bytes(config, [16], "float32", "fused")
    assert found["forward_flops"]["attention"] > 0 < found["memory"]["activations"]
    with pytest.raises(ValueError, match="training steps of 'mixtral' models are not planned"):
        measure_step(student_of_plan("mixtral", "windows"), setup_for())


@pytest.mark.parametrize("case", [*FAMILIES, "spade classifier"])
def test_a_plan_is_made_of_what_is_measured(case):
    """With the fused kernels, as `Setup` has them; the step itself is compared for one case."""
    config = built(case).config
    found = plan(config, setup_for())
    held = weights(meta_model(config, "float32"), setup_for())
    assert {kind: found.memory[kind] for kind in held} == held
    assert [found.state] == decoding_state_bytes(config, [LENGTH], "float32", "fused")
    assert (found.state > 0) == ("classifier" not in case)
    if case == "longhorn":
        step = measured(case, setup_for())
        steps = {"activations": step.activations, "recomputed": step.recomputed, "logits": step.logits}
        assert found.memory == held | steps
        assert (found.forward_flops, found.step_flops) == (step.forward_flops, step.step_flops)
        assert plan(config, setup_for(gpus=3)).step_flops == 3 * step.step_flops


# every class of every family once, a bidirectional encoder's apart; a student's base model has its teacher's name
HEADS = {
    (EVERY[variant][0], name, "bidirectional" in variant): (variant, name)
    for variant, name in COMBINATIONS
    if name != "HybridStudentModel"
}


@pytest.mark.parametrize("variant, class_name", HEADS.values())
def test_a_folder_is_planned_with_its_own_head(variant, class_name, tmp_path):
    """Of every class that a folder can hold: its parameters, logits of a vocabulary or none, a state or none."""
    model = classes_of(variant)[class_name](config_of(variant))
    model.save_pretrained(tmp_path)
    config = config_of_folder(tmp_path)
    found = plan(config, Setup(batch=2, length=16, kernels="torch"))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.memory["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
    of_vocabulary = any(name in class_name for name in ("CausalLM", "MaskedLM", "ConditionalGeneration"))
    has_state = class_name.endswith(("CausalLM", "ConditionalGeneration", "Model")) and "Encoder" not in class_name
    assert of_vocabulary or not found.memory["logits"]
    assert (found.state > 0) == (has_state and not family_of(config.model_type).is_classifier(config))
    assert found.step_flops > sum(found.forward_flops.values()) > 0
    if not of_vocabulary:  # the head's part is of classes, not of the vocabulary
        assert (found.forward_flops["head"] > 0) == ("For" in class_name)


@pytest.mark.parametrize(
    "fields",
    [{"num_labels": 1}, {"num_labels": 3, "problem_type": "multi_label_classification"}, {"pad_token_id": None}],
    ids=str,
)
def test_classifiers_of_values_and_without_padding_are_planned(fields):
    config = config_of("longhorn", architectures=["LonghornForSequenceClassification"], **fields)
    found = plan(config, Setup(batch=2, length=16))
    assert not found.memory["logits"] and found.step_flops > 0


def test_what_a_classifier_of_a_folder_keeps():
    """Of a family whose configuration may be a language model's too: what real tensors keep."""
    model = classes_of("longhorn")["LonghornForSequenceClassification"](config_of("longhorn", vocab_size=5000)).train()
    config = config_of("longhorn", vocab_size=5000, architectures=["LonghornForSequenceClassification"])
    with backend("torch"):
        kept = bytes_kept(model, batch_for(model))
    found = measure_step(config, setup_for(kernels="torch"))
    assert found.logits == 0 and found.activations == pytest.approx(kept, rel=WITHIN)


class OwnOps(TorchDispatchMode):
    """The ops of this package that are called."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "hf_hybrid_ssm":
            self.called.add(op.overloadpacket)
        return op(*args, **kwargs or {})


@EVERY_CASE
def test_operations_of_every_kernel_are_counted(case):
    """By any `FlopCounterMode`, where an op without a formula counts as nothing; the short convolutions are left out
    like other small products."""
    model = built(case)
    model(**batch_for(model, rows=1))  # kernels check themselves before their first use
    with OwnOps() as ops:
        model(**batch_for(model, rows=1)).loss.backward()
    assert {op for op in ops.called - set(flop_registry) if "causal_conv" not in str(op)} == set()


LARGEST = ["longhorn/1.3b", "bst/1.3b", "lmu_isa/100m-deep-global", "spade/spade-lm-wt103", "spade_seq2seq/spade-base"]


@pytest.mark.parametrize("name", [*LARGEST, "spade/spade-lra-retrieval-chunk"])
def test_presets_have_plans_in_seconds(name):
    checkpointing = name == LARGEST[0]  # which takes two forwards more, of any model
    begun = time.process_time()
    found = plan(
        preset_config(name), Setup(mixed_precision=True, checkpointing=checkpointing, sharding="fsdp2", gpus=4)
    )
    assert time.process_time() - begun < 30
    assert found.parameters >= found.trainable > 0 and found.step_flops > 0
    assert found.total > 4 * found.trainable  # a quarter each of weights, gradients and two moments, in float32
    assert (found.memory.get("recomputed", 0) > 0) == checkpointing


def test_refusals():
    with pytest.raises(ValueError, match="batch=0 must be at least 1"):
        Setup(batch=0)
    with pytest.raises(ValueError, match="sharding='zero' must be one of 'ddp', 'fsdp2'"):
        Setup(sharding="zero")
    with pytest.raises(ValueError, match="mixed_precision=True keeps the weights in float32"):
        Setup(mixed_precision=True, dtype="bfloat16")


# oneDNN's LSTM keeps a workspace of its own, which fake tensors do not show
@pytest.mark.parametrize(("ssm_type", "within"), [("s5", WITHIN), ("hyena", WITHIN), ("ema", WITHIN), ("lstm", 0.4)])
def test_every_mixer_is_planned(ssm_type, within):
    config = AutoConfig.for_model("spade", **SIZES | WIDE_SPADE | WITHOUT_DROPOUT, ssm_type=ssm_type)
    model = AutoModelForCausalLM.from_config(config).train()
    with backend("torch"):
        kept = bytes_kept(model, batch_for(model))
    assert activations(measure_step(config, setup_for(kernels="torch"))) == pytest.approx(kept, rel=within)
