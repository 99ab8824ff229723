"""Saving and loading lose no bit: every class of every family, through every way of loading.

    python -m tests.reliability.roundtrips

Writes docs/reliability/roundtrips.md. Exits with 1 if something came back different.

A checkpoint that comes back a little different is the worst kind of fault: nothing fails, results are only worse. The
dangers here are parameters that `_init_weights` draws anew behind a load, recurrence parameters that must stay float32
in a bfloat16 model, ties that become copies, buffers that no checkpoint holds, and filters remembered from before.
"""

import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_hybrid_ssm.auto import FAMILIES
from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.models.bst.recurrent_states import RecurrentStates
from hf_hybrid_ssm.models.lmu_isa.lmu import ImplicitAttention
from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornMixer
from tests.memory import in_own_memory
from tests.reliability.bits import same_bits
from tests.reliability.population import COMBINATIONS, build, classes_of, inputs_for
from tests.reliability.reporting import table, write_page

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHARDS = {"one file": "1GB", "sharded": "8KB"}
AUTO_CLASSES = {
    "MODEL": transformers.AutoModel,
    "MODEL_FOR_CAUSAL_LM": transformers.AutoModelForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": transformers.AutoModelForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION": transformers.AutoModelForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING": transformers.AutoModelForQuestionAnswering,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM": transformers.AutoModelForSeq2SeqLM,
    "MODEL_FOR_TEXT_ENCODING": transformers.AutoModelForTextEncoding,
}
LARGEST_INITIAL_VALUE = 1e3  # memory that nobody initialised holds anything; initial values are small numbers


def auto_class_of(model: PreTrainedModel) -> Any:
    """The Auto class whose table leads from the model's configuration to its class."""
    name = type(model).__name__
    tables = next(family.heads for family in FAMILIES if family.model_type == model.config.model_type)
    return next(AUTO_CLASSES[key] for key, class_name in tables.items() if class_name == name)


# -- ways of loading ------------------------------------------------------------------------------------------------


def plainly(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return type(model).from_pretrained(folder, dtype=dtype)


def by_auto_class(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """With the dtype that the folder's configuration states."""
    return auto_class_of(model).from_pretrained(folder, dtype="auto")


def by_device_map(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return type(model).from_pretrained(folder, dtype=dtype, device_map="cpu")


def with_little_memory(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return type(model).from_pretrained(folder, dtype=dtype, low_cpu_mem_usage=True)


def from_meta_device(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
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
    tied = set(getattr(empty, "all_tied_weights_keys", {}))
    if unexpected or set(missing) - tied:
        raise RuntimeError(f"missing {sorted(set(missing) - tied)}, unexpected {unexpected}")
    empty.tie_weights()
    return empty


WAYS: dict[str, Callable[[PreTrainedModel, Path, torch.dtype], PreTrainedModel]] = {
    "`from_pretrained`": plainly,
    'Auto class, `dtype="auto"`': by_auto_class,
    '`device_map="cpu"`': by_device_map,
    "`low_cpu_mem_usage`": with_little_memory,
    "meta device, then `load_state_dict`": from_meta_device,
}


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


def recurrence_names(model: PreTrainedModel) -> set[str]:
    """Parameters of the recurrences: those that a family draws by rules of its own."""
    return {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if isinstance(module, Mixer | LonghornMixer | ImplicitAttention | RecurrentStates)
        for name, _ in module.named_parameters(recurse=False)
    }


def kept_in_float32(model: PreTrainedModel) -> set[str]:
    """Parameters whose last or any part of the name the model declares to be float32 whatever is asked for."""
    declared = set(model._keep_in_fp32_modules_strict or ()) | set(model._keep_in_fp32_modules or ())
    return {name for name, _ in model.named_parameters() if declared & set(name.split("."))}


def differences(before: PreTrainedModel, after: PreTrainedModel) -> Iterator[str]:
    """What is not the same in a loaded model: names, bits, ties, what trains and at which rate."""
    old, new = tensors_of(before), tensors_of(after)
    yield from (f"{name} is missing or new" for name in sorted(old.keys() ^ new.keys()))
    for name in old.keys() & new.keys():
        if not same_bits(old[name], new[name]):
            yield f"{name} differs ({old[name].dtype}, {new[name].dtype})"
        if old[name].requires_grad != new[name].requires_grad:
            yield f"{name}: requires_grad is {new[name].requires_grad}"
        if getattr(old[name], "_optim", None) != getattr(new[name], "_optim", None):
            yield f"{name}: its options for the optimizer are {getattr(new[name], '_optim', None)}"
    if ties_of(before) != ties_of(after):
        yield f"ties {ties_of(before)} became {ties_of(after)}"


def cast_differences(original: PreTrainedModel, cast: PreTrainedModel, dtype: torch.dtype) -> Iterator[str]:
    """Loading float32 in a narrower dtype: each tensor rounded once, the declared ones untouched, buffers too."""
    kept, old = kept_in_float32(original), tensors_of(original)
    parameters = dict(original.named_parameters(remove_duplicate=False))
    for name, tensor in tensors_of(cast).items():
        persistent = name in parameters or name in original.state_dict()
        rounded = persistent and name not in kept and old[name].is_floating_point()
        wanted = old[name].detach().to(dtype) if rounded else old[name]
        if not same_bits(wanted, tensor):
            yield f"{name} is not the float32 value {'rounded' if rounded else 'itself'} ({tensor.dtype})"


@torch.no_grad()
def outputs_differ(before: PreTrainedModel, after: PreTrainedModel) -> bool:
    """Whether a forward pass tells the two apart: it would also show what no parameter or buffer holds."""
    inputs = inputs_for(before)
    first, second = (model.eval()(**inputs)[0] for model in (before, after))
    rounding = 32 * torch.finfo(first.dtype).eps * first.abs().max()
    if not (first - second).abs().max() <= rounding:  # as they are, filters they keep included
        return True
    return not same_bits(*(in_own_memory(model)(**inputs)[0] for model in (before, after)))


# -- the trips ------------------------------------------------------------------------------------------------------


def trips(
    variant: str, class_name: str, dtypes: tuple[torch.dtype, ...], ways: list[str], shards: list[str]
) -> Iterator[tuple[str, int, int, list[str]]]:
    """Each trip of a class: its kind, tensors compared, parameters of recurrences among them, and the faults."""
    original = build(variant, class_name)
    count, recurrent = len(tensors_of(original)), len(recurrence_names(original))
    with tempfile.TemporaryDirectory() as folder:
        original.save_pretrained(Path(folder) / "float32")
        for dtype in dtypes:
            model = type(original).from_pretrained(Path(folder) / "float32", dtype=dtype)
            yield "cast", count, recurrent, list(cast_differences(original, model, dtype))
            in_place = [
                f"{dtype} cast in place: {fault}" for fault in differences(model, build(variant, class_name).to(dtype))
            ]
            yield "cast in place", count, recurrent, in_place
            for shard in shards:
                saved = Path(folder) / f"{dtype}-{shard}"
                model.save_pretrained(saved, max_shard_size=SHARDS[shard])
                if shard == "sharded" and len(list(saved.glob("*.safetensors"))) < 2:
                    yield shard, 0, 0, ["there is one shard only"]
                for way in ways:
                    loaded = WAYS[way](model, saved, dtype)
                    faults = list(differences(model, loaded))
                    if outputs_differ(model, loaded):
                        faults.append("the outputs differ")
                    yield way, count, recurrent, [f"{dtype} {shard}: {fault}" for fault in faults]


def exchanges(variant: str, class_name: str, dtype: torch.dtype) -> Iterator[tuple[str, int, int, list[str]]]:
    """The folder of one class loaded into each other class of the family: what both have must come over."""
    source = build(variant, class_name)
    kept = {_without_prefix(name) for name in kept_in_float32(source)}
    old = {_without_prefix(name): tensor for name, tensor in tensors_of(source).items()}
    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        for target_name, target_class in classes_of(variant).items():
            if target_name == class_name:
                continue
            target, faults, shared, recurrent = target_class.from_pretrained(folder, dtype=dtype), [], 0, 0
            recurrences = recurrence_names(target)
            for name, tensor in tensors_of(target).items():
                inner = _without_prefix(name)
                if inner in old:
                    shared += 1
                    recurrent += name in recurrences
                    unrounded = inner in kept or inner not in {_without_prefix(n) for n in source.state_dict()}
                    wanted = old[inner] if unrounded or not old[inner].is_floating_point() else old[inner].to(dtype)
                    if not same_bits(wanted, tensor):
                        faults.append(f"into {target_name}: {name} differs")
                elif not bool((tensor.detach().abs() < LARGEST_INITIAL_VALUE).all()):
                    faults.append(f"into {target_name}: {name} was not initialised")
            if not shared:
                faults.append(f"into {target_name}: nothing came over")
            yield "into another class", shared, recurrent, faults


def _without_prefix(name: str) -> str:
    return name.removeprefix("model.")


def all_trips(variant: str, class_name: str) -> list[tuple[str, int, int, list[str]]]:
    """Every trip of a class: in each dtype and way, one file and shards; into the other classes in bfloat16."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    own = trips(variant, class_name, DTYPES, list(WAYS), list(SHARDS))
    return [*own, *exchanges(variant, class_name, torch.bfloat16)]


def main() -> int:
    loads: Counter[str] = Counter()
    by_class: dict[str, Counter[str]] = defaultdict(Counter)
    faults: list[tuple[str, str, str]] = []
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as processes:
        done = processes.map(all_trips, *zip(*COMBINATIONS))
        for (variant, class_name), every in zip(COMBINATIONS, done):
            tally = by_class[class_name]
            tally["variants"] += 1
            for kind, count, recurrent, found in every:
                loads[kind] += 1
                tally.update(loads=1, tensors=count, recurrent=recurrent, faults=len(found))
                faults += [(variant, class_name, fault) for fault in found]
            print(variant, class_name, tally["faults"], flush=True)
    columns = ["variants", "loads", "tensors", "recurrent", "faults"]
    names = {
        "cast": "float32 folder, in the dtype",
        "cast in place": "not at all: `.to(dtype)` of the float32 model, against the line above",
    }
    write_page(
        "roundtrips",
        "Saving and loading, bit by bit",
        "`make roundtrips` moves every parameter and saved buffer of a tiny model off its initial value, saves it (in "
        "one file and in shards), loads it, and compares: names, dtypes and bits of every parameter and buffer, which "
        "of them share memory, which train and at what rate of their own, and the bits of a forward pass. In float32, "
        "bfloat16 and float16; the parameters that a model declares float32 must have the bits of the float32 file in "
        "each. A folder is also loaded into the other classes of its family (a base model into one with a head, and "
        "back), in bfloat16: what both have must come over, and what is new must be initialised.",
        table(["loaded", "times"], [[names.get(kind, kind), number] for kind, number in loads.items()]),
        table(
            ["class", "variants", "loads", "tensors compared", "of them of recurrences", "faults"],
            [[name, *(f"{tally[column]:,}" for column in columns)] for name, tally in sorted(by_class.items())],
        ),
        table(["variant", "class", "fault"], faults) if faults else "No fault.",
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
