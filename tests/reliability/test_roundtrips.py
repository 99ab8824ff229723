"""Saving and loading lose no bit.

Dangers: parameters drawn anew after a load, recurrence parameters rounded to bfloat16, ties that become copies,
buffers that no checkpoint holds, filters remembered from before. Every parameter and saved buffer is moved off its
initial value first; compared are names, dtypes and bits, which share memory, which train and at what rate,
and the bits of a forward pass. That the classes of a family load each other's folders is in tests/models.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_hybrid_ssm.models import FAMILIES
from tests.memory import in_own_memory
from tests.reliability.bits import same_bits
from tests.reporting import THOROUGH
from tests.tiny_models import COMBINATIONS, FEW, build, inputs_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# -- ways of loading ------------------------------------------------------------------------------------------------


def auto_class_of(model: PreTrainedModel) -> type:
    """The Auto class whose table leads from the model's configuration to its class."""
    tables = next(family.heads for family in FAMILIES if family.model_type == model.config.model_type)
    key = next(key for key, name in tables.items() if name == type(model).__name__)
    mapping = getattr(modeling_auto, f"{key}_MAPPING")
    autos = (value for name, value in vars(modeling_auto).items() if name.startswith("AutoModel"))
    return next(auto for auto in autos if auto._model_mapping is mapping)


def from_meta_device(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """What FSDP does: built without memory, given memory, initialised, then filled.

    The empty model has the dtypes of the one that was saved; the values must come from the folder.
    """
    with torch.device("meta"):
        empty = type(model)(model.config)
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(model).items()}
    for name, tensor in tensors_of(empty).items():
        tensor.data = tensor.data.to(dtypes[name])
    empty.to_empty(device="cpu")
    empty.init_weights()
    saved = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    missing, unexpected = empty.load_state_dict(saved, strict=False)
    assert not unexpected and set(missing) <= set(getattr(empty, "all_tied_weights_keys", {}))
    empty.tie_weights()
    return empty


WAYS: dict[str, dict] = {
    "`from_pretrained`": {},
    'Auto class, `dtype="auto"`': {"dtype": "auto"},
    '`device_map="cpu"`': {"device_map": "cpu"},
    "meta device, then `load_state_dict`": {},
}


def load(way: str, model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    if "meta" in way:
        return from_meta_device(model, folder)
    source = auto_class_of(model) if "Auto" in way else type(model)
    return source.from_pretrained(folder, **{"dtype": dtype, **WAYS[way]})


# -- what must be the same ------------------------------------------------------------------------------------------


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, tied ones under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def ties_of(model: PreTrainedModel) -> set[frozenset[str]]:
    """The groups of parameter names that share memory."""
    groups = defaultdict(set)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        groups[tensor.data_ptr()].add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


def kept_in_float32(model: PreTrainedModel) -> set[str]:
    """Parameters whose last or any part of the name the model declares to be float32 whatever is asked for."""
    declared = set(model._keep_in_fp32_modules_strict or ()) | set(model._keep_in_fp32_modules or ())
    return {name for name, _ in model.named_parameters() if declared & set(name.split("."))}


def differences(before: PreTrainedModel, after: PreTrainedModel) -> Iterator[str]:
    """What is not the same in a loaded model: names, bits, ties, what trains."""
    old, new = tensors_of(before), tensors_of(after)
    yield from (f"{name} is missing or new" for name in sorted(old.keys() ^ new.keys()))
    for name in old.keys() & new.keys():
        if not same_bits(old[name], new[name]):
            yield f"{name} differs ({old[name].dtype}, {new[name].dtype})"
        if old[name].requires_grad != new[name].requires_grad:
            yield f"{name}: requires_grad is {new[name].requires_grad}"
    if ties_of(before) != ties_of(after):
        yield f"ties {ties_of(before)} became {ties_of(after)}"


@torch.no_grad()
def outputs_of(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a forward pass of the model as it is, filters it keeps included, and of one in memory of its own."""
    inputs = inputs_for(model)
    as_it_is = model.eval()(**inputs)[0]
    return as_it_is, in_own_memory(model)(**inputs)[0]


def outputs_differ(before: tuple[torch.Tensor, ...], after: tuple[torch.Tensor, ...]) -> bool:
    """Whether `outputs_of` tells two models apart: it would also show what no parameter or buffer holds."""
    rounding = 32 * torch.finfo(before[0].dtype).eps * before[0].abs().max()
    return not (before[0] - after[0]).abs().max() <= rounding or not same_bits(before[1], after[1])


def cast(original: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors in a narrower dtype: each rounded once, the declared ones untouched, unsaved buffers too."""
    untouched = kept_in_float32(original) | (tensors_of(original).keys() - original.state_dict().keys())
    return {
        name: tensor if name in untouched or not tensor.is_floating_point() else tensor.detach().to(dtype)
        for name, tensor in tensors_of(original).items()
    }


def cast_differences(original: PreTrainedModel, found: PreTrainedModel, dtype: torch.dtype) -> Iterator[str]:
    expected = cast(original, dtype)
    for name, tensor in tensors_of(found).items():
        if not same_bits(expected[name], tensor):
            yield f"{name} is not the float32 value {'itself' if expected[name].dtype != dtype else 'rounded'}"


# -- the trips ------------------------------------------------------------------------------------------------------

RARE = ["spade batchnorm", "bst block-recurrent", "spade ema", "bst s5 bidirectional"]  # have what few variants have
EVERY_CLASS = [case for case in COMBINATIONS if THOROUGH or case[0] in FEW + RARE]
PLAINLY, ONE_FILE, SHARDED = "`from_pretrained`", "1GB", "8KB"


def trips(variant: str, name: str, folder: Path, dtypes: Iterable, ways: Iterable[str], shards: Iterable[str]):
    """The faults of each trip of a class."""
    original = build(variant, name)
    original.save_pretrained(folder / "float32")
    for dtype in dtypes:
        model = type(original).from_pretrained(folder / "float32", dtype=dtype)
        yield list(cast_differences(original, model, dtype))
        yield [f"cast in place: {fault}" for fault in differences(model, copy.deepcopy(original).to(dtype))]
        outputs = outputs_of(model)
        for size in shards:
            saved = folder / f"{dtype}-{size}"
            model.save_pretrained(saved, max_shard_size=size)
            assert (len(list(saved.glob("*.safetensors"))) > 1) == (size == SHARDED)
            for way in ways:
                loaded = load(way, model, saved, dtype)
                differ = outputs_differ(outputs, outputs_of(loaded))
                faults = [*differences(model, loaded), *["the outputs differ"] * differ]
                yield [f"{way}, {dtype} {size}: {fault}" for fault in faults]


@pytest.mark.parametrize(("variant", "name"), EVERY_CLASS)
def test_saved_and_loaded(variant, name, tmp_path, record_property):
    """In the dtypes, cast while loading and in place, and the headed models in every way from one file and shards."""
    headed = THOROUGH or "ForCausal" in name or "ForCond" in name
    dtypes = DTYPES if headed else DTYPES[1:2] if variant in RARE else DTYPES[2:]
    ways, shards = (WAYS, [ONE_FILE, SHARDED] if THOROUGH else [SHARDED]) if headed else ([PLAINLY], [ONE_FILE])
    loads = list(trips(variant, name, tmp_path, dtypes, ways, shards))
    record_property("loads", len(loads))
    assert [fault for faults in loads for fault in faults] == []


def test_rotary_frequencies_stay_exact_when_a_model_is_cast_in_place():
    """No file holds them, hence a reloaded model would have other ones."""
    model = build("longhorn + window and full attention", "LonghornModel")
    frequencies = model.rotary_emb.inv_freq.clone()
    assert not torch.equal(frequencies.to(torch.bfloat16).to(torch.float32), frequencies)
    assert torch.equal(model.half().rotary_emb.inv_freq, frequencies)
    assert model.double().rotary_emb.inv_freq.dtype == torch.float64
