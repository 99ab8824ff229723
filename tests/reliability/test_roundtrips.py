"""Saving and loading lose no bit.

A checkpoint that comes back a little different is the worst kind of fault: nothing fails, results are only worse. The
dangers here are parameters that `_init_weights` draws anew after a load, recurrence parameters that must stay float32
in a bfloat16 model, ties that become copies, buffers that no checkpoint holds, and filters remembered from before.

Every parameter and saved buffer is moved off its initial value first; compared are names, dtypes and bits of every
parameter and buffer, which of them share memory, which train and at what rate of their own, and the bits of a forward
pass. A folder is also loaded into the other classes of its family: what both have must come over, and what is new must
be initialised.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_hybrid_ssm.auto import FAMILIES
from hf_hybrid_ssm.layers.mixers.s4 import S4
from hf_hybrid_ssm.models.spade.modeling_spade import SpadePreTrainedModel
from tests.memory import in_own_memory
from tests.reliability.bits import same_bits
from tests.reporting import THOROUGH
from tests.tiny_models import COMBINATIONS, FEW, build, class_with_loss, classes_of, inputs_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHARDS = {"one file": "1GB", "sharded": "8KB"}
AUTO_CLASSES = {
    "MODEL": transformers.AutoModel,
    "MODEL_FOR_CAUSAL_LM": transformers.AutoModelForCausalLM,
    "MODEL_FOR_MASKED_LM": transformers.AutoModelForMaskedLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": transformers.AutoModelForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION": transformers.AutoModelForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING": transformers.AutoModelForQuestionAnswering,
    "MODEL_FOR_MULTIPLE_CHOICE": transformers.AutoModelForMultipleChoice,
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
    "`from_pretrained`": lambda model, folder, dtype: type(model).from_pretrained(folder, dtype=dtype),
    'Auto class, `dtype="auto"`': lambda model, folder, dtype: auto_class_of(model).from_pretrained(
        folder, dtype="auto"
    ),
    '`device_map="cpu"`': lambda model, folder, dtype: type(model).from_pretrained(
        folder, dtype=dtype, device_map="cpu"
    ),
    "`low_cpu_mem_usage`": lambda model, folder, dtype: type(model).from_pretrained(
        folder, dtype=dtype, low_cpu_mem_usage=True
    ),
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
    variant: str, class_name: str, dtypes: Iterable[torch.dtype], ways: Iterable[str], shards: Iterable[str]
) -> Iterator[tuple[int, list[str]]]:
    """Each trip of a class: tensors compared, and the faults."""
    original = build(variant, class_name)
    count = len(tensors_of(original))
    with tempfile.TemporaryDirectory() as folder:
        original.save_pretrained(Path(folder) / "float32")
        for dtype in dtypes:
            model = type(original).from_pretrained(Path(folder) / "float32", dtype=dtype)
            yield count, list(cast_differences(original, model, dtype))
            in_place = [
                f"{dtype} cast in place: {fault}" for fault in differences(model, build(variant, class_name).to(dtype))
            ]
            yield count, in_place
            for shard in shards:
                saved = Path(folder) / f"{dtype}-{shard}"
                model.save_pretrained(saved, max_shard_size=SHARDS[shard])
                if shard == "sharded" and len(list(saved.glob("*.safetensors"))) < 2:
                    yield 0, ["there is one shard only"]
                for way in ways:
                    loaded = WAYS[way](model, saved, dtype)
                    faults = list(differences(model, loaded))
                    if outputs_differ(model, loaded):
                        faults.append("the outputs differ")
                    yield count, [f"{way}, {dtype} {shard}: {fault}" for fault in faults]


def exchanges(variant: str, class_name: str, dtype: torch.dtype) -> Iterator[tuple[int, list[str]]]:
    """The folder of one class loaded into each other class of the family: what both have must come over."""
    source = build(variant, class_name)
    kept = {_without_prefix(name) for name in kept_in_float32(source)}
    old = {_without_prefix(name): tensor for name, tensor in tensors_of(source).items()}
    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        for target_name, target_class in classes_of(variant).items():
            if target_name == class_name:
                continue
            # a head of as many classes comes over; multiple choice has one score instead
            target = target_class.from_pretrained(folder, dtype=dtype, ignore_mismatched_sizes=True)
            faults, shared = [], 0
            for name, tensor in tensors_of(target).items():
                inner = _without_prefix(name)
                is_other_head = inner.startswith(("score.", "classifier.")) and "MultipleChoice" in (
                    class_name + target_name
                )
                if inner in old and not is_other_head:
                    shared += 1
                    unrounded = inner in kept or inner not in {_without_prefix(n) for n in source.state_dict()}
                    wanted = old[inner] if unrounded or not old[inner].is_floating_point() else old[inner].to(dtype)
                    if not same_bits(wanted, tensor):
                        faults.append(f"into {target_name}: {name} differs")
                elif not bool((tensor.detach().abs() < LARGEST_INITIAL_VALUE).all()):
                    faults.append(f"into {target_name}: {name} was not initialised")
            if not shared:
                faults.append(f"into {target_name}: nothing came over")
            yield shared, faults


def _without_prefix(name: str) -> str:
    return name.removeprefix("model.")


EVERY_CLASS = COMBINATIONS if THOROUGH else [(variant, name) for variant in FEW for name in classes_of(variant)]
HEADED = [(variant, name) for variant, name in EVERY_CLASS if "ForCausal" in name or "ForCond" in name]
PLAINLY = "`from_pretrained`"


def faults_of(reports, record_property=lambda name, value: None):
    reports = list(reports)
    assert reports
    record_property("loads", len(reports))
    record_property("tensors compared", sum(count for count, _ in reports))
    return [fault for _, found in reports for fault in found]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("variant", "class_name"), HEADED)
def test_saved_in_shards_and_loaded_in_bfloat16(variant, class_name, way):
    assert faults_of(trips(variant, class_name, (torch.bfloat16,), [way], ["sharded"])) == []


@pytest.mark.parametrize(("variant", "class_name"), EVERY_CLASS)
def test_saved_and_loaded(variant, class_name, record_property):
    """In the dtypes, cast while loading and in place; on the page in every way and in shards too."""
    dtypes = DTYPES if THOROUGH or (variant, class_name) in HEADED else DTYPES[2:]
    ways, shards = (WAYS, SHARDS) if THOROUGH else ([PLAINLY], ["one file"])
    assert faults_of(trips(variant, class_name, dtypes, ways, shards), record_property) == []


@pytest.mark.parametrize(("variant", "class_name"), EVERY_CLASS)
def test_loaded_into_the_other_classes_of_the_family(variant, class_name):
    assert faults_of(exchanges(variant, class_name, torch.bfloat16)) == []


@pytest.mark.parametrize("variant", ["spade batchnorm", "bst block-recurrent", "spade ema", "bst s5 bidirectional"])
def test_loaded_with_what_few_variants_have(variant):
    """Running statistics, recurrent states, exponential averages, two directions."""
    for class_name in classes_of(variant):
        assert faults_of(trips(variant, class_name, (torch.bfloat16,), [PLAINLY], ["one file"])) == []


def test_the_population_has_what_is_looked_for():
    """Or the checks above would have nothing to find."""
    longhorn = build("longhorn", "LonghornForCausalLM")
    assert ties_of(longhorn) == {frozenset({"lm_head.weight", "model.embed_tokens.weight"})}
    assert ties_of(build("longhorn untied", "LonghornForCausalLM")) == set()
    assert any(name.endswith("dt_bias") for name in kept_in_float32(longhorn))
    spade = build("spade s4 trained")
    assert {name.rpartition(".")[2] for name in kept_in_float32(spade)} >= set(S4.float32_parameters)


def spoil_bit(model):
    next(parameter for name, parameter in model.named_parameters() if name.endswith("log_dt")).data.view(-1)[0] *= (
        1 + 2**-23
    )


def spoil_dtype(model):
    model.model.layers[0].to(torch.float16)


def spoil_tie(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def spoil_training(model):
    next(model.parameters()).requires_grad_(False)


@pytest.mark.parametrize("spoil", [spoil_bit, spoil_dtype, spoil_tie, spoil_training])
def test_a_difference_is_found(spoil):
    before, after = (build("spade s4 trained") for _ in range(2))
    assert list(differences(before, after)) == []
    spoil(after)
    assert list(differences(before, after))


@pytest.mark.parametrize("variant", ["longhorn + window and full attention", "spade s4 trained"])
def test_float32_parameters_stay_so_when_a_model_is_cast_in_place(variant):
    """As through a file; a rounded one is found."""
    name = class_with_loss(variant)
    before, after = build(variant, name), build(variant, name).to(torch.bfloat16)
    assert list(cast_differences(before, after, torch.bfloat16)) == []
    kept = kept_in_float32(after)
    for tensor in after.parameters():
        tensor.data = tensor.data.to(torch.bfloat16).to(tensor.dtype)
    faults = list(cast_differences(before, after, torch.bfloat16))
    assert kept and {fault.split()[0] for fault in faults} == kept
    assert "itself" in faults[0]


def test_rotary_frequencies_stay_exact_when_a_model_is_cast_in_place():
    """No file holds them, hence a reloaded model would have other ones."""
    model = build("longhorn + window and full attention", "LonghornModel")
    frequencies = model.rotary_emb.inv_freq.clone()
    assert not torch.equal(frequencies.to(torch.bfloat16).to(torch.float32), frequencies)
    assert torch.equal(model.half().rotary_emb.inv_freq, frequencies)
    assert model.double().rotary_emb.inv_freq.dtype == torch.float64


def test_parameters_drawn_anew_behind_a_load_are_found(monkeypatch):
    """The fault that transformers' own `init` functions guard against: in-place writes that know no checkpoint."""
    original = SpadePreTrainedModel._init_weights

    def careless(self, module):
        original(self, module)
        if isinstance(module, S4):
            module.reset_parameters()

    def initialises_loaded_modules(self, *args, **kwargs):
        for module in self.modules():
            self._init_weights(module)

    monkeypatch.setattr(SpadePreTrainedModel, "_init_weights", careless)
    monkeypatch.setattr(SpadePreTrainedModel, "initialize_weights", initialises_loaded_modules)
    faults = faults_of(trips("spade s4 trained", "SpadeForCausalLM", (torch.float32,), [PLAINLY], ["one file"]))
    assert any(".ssm." in fault or "log_dt" in fault for fault in faults)


def test_a_remembered_filter_is_found():
    """Outputs are compared too: a stale kernel is in no parameter and no buffer."""
    before, after = (build("spade s4 window") for _ in range(2))
    assert not outputs_differ(before, after)
    mixer = next(module for module in after.modules() if isinstance(module, S4))
    tensors = {key: value.clone() for key, value in tensors_of(after).items()}
    with torch.no_grad():
        mixer.C.mul_(2)
        after(input_ids=torch.arange(3, 60).unsqueeze(0))  # remembers the filter of the doubled C
        remembered = dict(mixer._kernel_cache)
        after.load_state_dict(tensors, strict=False)
    mixer._clear_if_changed()
    mixer._kernel_cache.update(remembered)
    assert list(differences(before, after)) == [] and outputs_differ(before, after)
