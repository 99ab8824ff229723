"""Arguments that nothing reads are refused, and what transformers' methods take, ours take too."""

import inspect

import pytest
import torch
from transformers import masking_utils
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5

import hf_hybrid_ssm
from hf_hybrid_ssm.models import FAMILIES
from hf_hybrid_ssm.models.heads import CausalLMHead
from hf_hybrid_ssm.models.inputs import LISTED
from hf_hybrid_ssm.models.outputs import CACHE
from tests.tiny_models import FEW, OF_STUDENTS, build, classes_of, inputs_for, language_model

CLASSES = [(variant, name) for variant in [*FEW, "bst s5 bidirectional"] for name in classes_of(variant)]
EVERY_CLASS = {name: getattr(hf_hybrid_ssm, name) for family in FAMILIES for name in family.names}


@pytest.mark.parametrize(("variant", "name"), CLASSES, ids=str)
def test_forwards_refuse_what_they_do_not_know(variant, name):
    model = build(variant, name)
    inputs = inputs_for(model)
    for wrong, near in (("attention_maks", "attention_mask"), ("state", None), ("token_type_ids", None)):
        meant = f"Did you mean '{near}'" if near else ""
        with pytest.raises(TypeError, match=rf"forward has no argument '{wrong}'\..*{meant}"):
            model(**inputs, **{wrong: torch.ones(2, 12)})


@pytest.mark.parametrize(("variant", "name"), CLASSES, ids=str)
def test_forwards_take_what_transformers_lists(variant, name):
    """With the value that says nothing."""
    model = build(variant, name)
    shown = inspect.signature(model.forward).parameters
    given = {name: None for name in LISTED - {"debug_io", "debug_io_dir", "prune_layers"} if name not in shown}
    inputs = inputs_for(model)
    torch.testing.assert_close(model(**inputs, **given)[0], model(**inputs)[0])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
@pytest.mark.parametrize("variant", FEW)
def test_generate_keeps_its_own_arguments_from_the_forward(variant, options):
    """A server gives it a tokenizer, which it hands on to the inputs of every step."""
    model = language_model(variant)
    ids = inputs_for(model)["input_ids"][:1]
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "use_cache": True} | options
    assert torch.equal(model.generate(ids, tokenizer=object(), **settings), model.generate(ids, **settings))


@pytest.mark.parametrize("variant", [variant for variant in [*FEW, *OF_STUDENTS] if variant != "encoder-decoder"])
def test_arguments_bound_to_the_signature_are_those_that_were_given(variant):
    """Pipeline parallelism binds them, and hands on as `kwargs` what is in `**kwargs`."""
    model = language_model(variant)
    ids = inputs_for(model)["input_ids"]
    with torch.no_grad():
        caches = [model(ids[:, :5], use_cache=True).cache for _ in range(2)]
        options = {"continues_documents": True, "output_hidden_states": True}
        expected = model(ids[:, 5:6], cache=caches[0], **options)
        bound = inspect.signature(model.forward).bind_partial(ids[:, 5:6], **{CACHE: caches[1]}, **options)
        assert set(bound.arguments["kwargs"]) == set(options)
        found = model(**bound.arguments)
    layers = model.config.num_hidden_layers
    assert torch.equal(found.logits, expected.logits)
    assert len(found.hidden_states) == len(expected.hidden_states) == layers + 1
    with pytest.raises(TypeError, match="no argument 'attention_maks'"):
        model(ids, kwargs={"attention_maks": None})


def test_generate_takes_the_labels_that_seq2seq_trainer_gives_it():
    model = language_model("encoder-decoder")
    ids = inputs_for(model)["input_ids"]
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, labels=ids[:, :4], **settings), model.generate(ids, **settings))


# -- methods of transformers that ours stand for ----------------------------------------------------------------------

MASKS = "masks by documents and windows are the layers' own, which see them without this"
HANDED_ON = "handed on by name, and looked for by nobody"
NONE_MADE = "no continuous batching: always refused"
MASKER = "create_masks_for_generate"
LACKING = {
    "from_pretrained": HANDED_ON,
    MASKER: MASKS,
    "save_pretrained": HANDED_ON,
    "push_to_hub": HANDED_ON,
    "generate_batch": NONE_MADE,
    "continuous_batching_context_manager": NONE_MADE,
}


def overridden():
    """(class, name, ours, transformers') of each public method that a class of ours stands for, once each."""
    seen = set()
    for cls in EVERY_CLASS.values():
        for name in {name for parent in cls.__mro__ if is_ours(parent) for name in vars(parent)}:
            holder = next(parent for parent in cls.__mro__ if name in vars(parent))
            after = cls.__mro__[cls.__mro__.index(holder) + 1 :]
            theirs = next((parent for parent in after if name in vars(parent) and not is_ours(parent)), None)
            ours = getattr(cls, name, None)
            if name.startswith("_") or theirs is None or not callable(ours) or isinstance(ours, type):
                continue
            if theirs.__module__.startswith("transformers") and (holder, name) not in seen:
                seen.add((holder, name))
                yield cls, name, ours, getattr(theirs, name)
        if issubclass(cls, CausalLMHead):  # a function there
            yield cls, MASKER, cls.create_masks_for_generate, masking_utils.create_masks_for_generate


def is_ours(cls):
    return cls.__module__.startswith("hf_hybrid_ssm")


def names_of(function):
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name for name, part in inspect.signature(function).parameters.items() if part.kind not in variable}


def test_overridden_methods_lack_no_parameter():
    """transformers looks for some in the signature: `generate` took no inputs_embeds where it was not found."""
    found = list(overridden())
    assert {"generate", "prepare_inputs_for_generation"} <= {name for _, name, *_ in found}
    lacking, reasons = {}, set()
    for cls, name, ours, theirs in found:
        missing = names_of(theirs) - names_of(ours) - {"self", "cls"}
        if missing and name in LACKING:
            kinds = {part.kind for part in inspect.signature(ours).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD in kinds, name
            reasons.add(name)
        elif missing:
            lacking[f"{cls.__name__}.{name}"] = missing
    assert lacking == {}
    assert reasons == set(LACKING)


SEGMENTS = {"token_type_ids"}  # a pair's halves, which the families do not tell apart
OF_BERTS_DECODER = {"encoder_hidden_states", "encoder_attention_mask", "cache", "past_key_values", "position_ids"}
HANDED_DOWN = {"position_ids", "cache", "past_key_values", "use_cache"}  # to the stack, which takes or refuses them
LIKE = {
    "CausalLM": (modeling_llama.LlamaForCausalLM, set()),
    "SequenceClassification": (
        GenericForSequenceClassification,
        {"position_ids", "cache", "past_key_values", "use_cache"},
    ),
    "TokenClassification": (GenericForTokenClassification, set()),
    "QuestionAnswering": (GenericForQuestionAnswering, set()),
    "MaskedLM": (modeling_bert.BertForMaskedLM, SEGMENTS | OF_BERTS_DECODER),
    "MultipleChoice": (modeling_bert.BertForMultipleChoice, SEGMENTS | {"position_ids"}),
    "ConditionalGeneration": (modeling_t5.T5ForConditionalGeneration, set()),
    "Model": (modeling_llama.LlamaModel, set()),
}


@pytest.mark.parametrize(("variant", "name"), CLASSES, ids=str)
def test_forwards_take_what_their_like_in_transformers_take(variant, name):
    like, without = next(found for kind, found in LIKE.items() if kind in name)
    if name.startswith("SpadeSeq2SeqModel"):
        like = modeling_t5.T5Model
    missing = names_of(like.forward) - names_of(EVERY_CLASS[name].forward) - without
    assert missing == set()
