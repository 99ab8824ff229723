"""The cache is called `cache` and `past_key_values`, whichever name the installed transformers uses."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from hf_hybrid_ssm.models.outputs import CACHE, NEW, OLD
from hf_hybrid_ssm.serving.context import load_context, save_context
from tests import processes
from tests.tiny_models import (
    FEW,
    build,
    classes_of,
    config_of,
    empty_cache,
    inputs_for,
    language_model,
    own_language_model,
)

NAMES = (NEW, OLD)
CLASSES = [(variant, name) for variant in [*FEW, "bst s5 bidirectional"] for name in classes_of(variant)]
CAUSAL = [variant for variant in FEW if variant != "encoder-decoder"]
IDS = torch.arange(3, 17).view(2, 7)


def has_cache(model):
    base = model.base_model
    return not getattr(base, "is_bidirectional", False)


@pytest.mark.parametrize(("variant", "name"), CLASSES, ids=str)
def test_every_class_takes_and_gives_both(variant, name):
    model = build(variant, name)
    inputs = inputs_for(model, length=7)
    given = [empty_cache(model) for _ in NAMES]
    if not has_cache(model):  # its tokens see both sides
        for key, cache in zip(NAMES, given):
            with pytest.raises(ValueError, match="cache cannot be used with a bidirectional"):
                model(**inputs, **{key: cache})
        return
    shown = inspect.signature(model.forward).parameters
    assert {key in shown for key in NAMES} == {True, False} or "MultipleChoice" in name
    outputs = [model(**inputs, use_cache=True, **{key: cache}) for key, cache in zip(NAMES, given)]
    assert torch.equal(outputs[0][0], outputs[1][0])
    for output, cache in zip(outputs, given):
        assert cache.get_seq_length() == (5 if model.config.is_encoder_decoder else 7)
        if CACHE in dict(output):  # heads of tokens and spans return none
            assert output.cache is output.past_key_values is output[NEW] is output[OLD] is output.get(OLD) is cache
            assert NEW in output and OLD in output and sum(key in NAMES for key in dict(output)) == 1
    with pytest.raises(ValueError, match="cache and past_key_values are two names"):
        model(**inputs, cache=given[0], past_key_values=given[1])


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("variant", FEW)
def test_generate_takes_and_gives_both(variant, beams):
    model = language_model(variant)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    settings |= {"num_beams": beams}
    texts = []
    for key in NAMES:
        cache = empty_cache(model)
        output = model.generate(IDS, **{key: cache}, **settings)
        assert output.cache is output.past_key_values is output[NEW] is output[OLD]
        assert beams > 1 or output.cache is cache
        texts.append(output.sequences)
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], model.generate(IDS, **settings).sequences)
    with pytest.raises(ValueError, match="cache and past_key_values are two names"):
        model.generate(IDS, cache=empty_cache(model), past_key_values=empty_cache(model), **settings)


@pytest.mark.parametrize("variant", FEW)
def test_inputs_of_a_step_hold_the_cache(variant):
    model = language_model(variant)
    for key in NAMES:
        cache = empty_cache(model)
        prepared = model.prepare_inputs_for_generation(IDS, attention_mask=torch.ones_like(IDS), **{key: cache})
        assert prepared[CACHE] is prepared[OLD] is cache


@pytest.mark.parametrize("variant", FEW)
def test_gradient_checkpointing_takes_the_cache_out(variant):
    """transformers finds it among a layer's arguments by its name in that version; a layer run again would store
    twice."""
    model = own_language_model(variant).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    cache = empty_cache(model)
    model(input_ids=IDS, labels=IDS, cache=cache).loss.backward()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("variant", CAUSAL)
def test_contexts_by_both_names(variant, tmp_path):
    model = language_model(variant)
    read = model(IDS, use_cache=True)
    for key in NAMES:
        file = tmp_path / f"{key}.safetensors"
        save_context(path=file, model=model, **{key: read.cache})
        context = load_context(file, model, **{key: DynamicCache(config=model.config)})
        assert context.cache is context.past_key_values and context.cache.get_seq_length() == IDS.shape[1]


SILENT = """
import torch, warnings
warnings.simplefilter("error")
from transformers import DynamicCache
from tests.tiny_models import FEW, language_model
ids = torch.arange(3, 17).view(2, 7)
for variant in FEW:
    model = language_model(variant)
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    output = model.generate(ids, **settings)
    output.cache, output.past_key_values
    for name in ("cache", "past_key_values") if variant != "encoder-decoder" else ():
        output = model(ids, use_cache=True, **{name: DynamicCache(config=model.config)})
        output.cache, output.past_key_values, output["past_key_values"]
        model.generate(ids, **{name: DynamicCache(config=model.config)}, **settings)
        model.generate(ids, **settings | {"cache_implementation": "static"})
    model.train()(input_ids=ids, labels=ids).loss.backward()
"""


def test_neither_name_brings_a_warning():
    """Of transformers, which writes what it deprecates and misses in docstrings to the terminal, each once."""
    run = processes.run([sys.executable, "-c", SILENT], with_transformers=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("variant", FEW)
def test_configurations_leave_the_cache_out_of_evaluation(variant):
    assert set(NAMES) <= set(config_of(variant).keys_to_ignore_at_inference)


# where the old name must stand: the table of names, fields that others read, and models of transformers
BOTH_STAND = {"outputs.py", "models/configuration.py", "context.py", "peers.py", "comparison.py", "timing/models.py"}


def test_the_name_of_one_version_stands_nowhere_else():
    """With transformers' own models it is deprecated from 5.24 on; with ours both are read, and one is enough."""
    root = Path(__file__).parents[2]
    found = [path for folder in ("src", "recipes", "benchmarks") for path in (root / folder).rglob("*.py")]
    found = [path.as_posix() for path in found if OLD in path.read_text(encoding="utf-8")]
    assert found and [path for path in found if not path.endswith(tuple(BOTH_STAND))] == []
