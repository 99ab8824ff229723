"""Caches of another model, another batch or another past, and what cannot be done with one."""

import torch
from transformers import DynamicCache, EncoderDecoderCache

from hf_hybrid_ssm.models.cache import carry_segment
from tests.reliability.misuses.inputs import IDS, MIXED, Case, filled, mask, misuse, model

CASES: list[Case] = [
    (
        "a tuple of tensors",
        lambda: model()(IDS, past_key_values=((IDS, IDS),)),
        TypeError,
        "past_key_values must be a transformers Cache of one stack, got tuple",
    ),
    (
        "fewer rows than the cache holds",
        lambda: model()(IDS[:1], past_key_values=filled()),
        ValueError,
        "past_key_values holds a batch of 2 .*batch of 1",
    ),
    (
        "fewer rows than a cache of keys and values alone holds",
        lambda: model(MIXED, "LonghornForCausalLM", block_types=("full_attention",) * 3)(
            IDS[:1], past_key_values=filled(MIXED, block_types=("full_attention",) * 3)
        ),
        ValueError,
        "past_key_values holds a batch of 2 .*batch of 1",
    ),
    (
        "the cache of a model with fewer layers",
        lambda: model()(IDS, past_key_values=DynamicCache(config=model("lmu-isa", "LmuIsaForCausalLM").config)),
        ValueError,
        r"past_key_values has layers \['RecurrentStateLayer', 'RecurrentStateLayer'\].*3 layers",
    ),
    (
        "the cache of a model with other kinds of layers",
        lambda: model()(IDS, past_key_values=filled("longhorn")),
        ValueError,
        "past_key_values has layers .*which are not those of this model",
    ),
    *(
        (
            f"a cache of {given} in {taken}",
            lambda given=given, taken=taken, of=of, into=into: model(taken, into)(
                IDS, past_key_values=filled(given, of)
            ),
            ValueError,
            f"past_key_values was filled by a model of the family '{of_family}'.*'{family}'",
        )
        for given, of, of_family, taken, into, family in (
            ("longhorn", "LonghornForCausalLM", "longhorn", "bst sh s4d", "BstForCausalLM", "bst"),
            ("bst sh s4d", "BstForCausalLM", "bst", "longhorn", "LonghornForCausalLM", "longhorn"),
            ("spade s4 window", "SpadeForCausalLM", "spade", "lmu-isa", "LmuIsaForCausalLM", "lmu_isa"),
            ("lmu-isa", "LmuIsaForCausalLM", "lmu_isa", "spade s4 window", "SpadeForCausalLM", "spade"),
        )
    ),
    (
        "the cache of a wider Longhorn",
        lambda: model("longhorn")(IDS, past_key_values=filled("longhorn", hidden_size=32)),
        ValueError,
        r"initial_state must have shape .*48\), got \(2, 3, 64\)",
    ),
    (
        "the cache of a BST with another state-space model",
        lambda: model("bst sh s4d", "BstForCausalLM")(IDS, past_key_values=filled("bst mh s4", "BstForCausalLM")),
        ValueError,
        "state must have shape",
    ),
    (
        "any cache for a model that looks ahead",
        lambda: model("bst s5 bidirectional", "BstModel")(IDS, past_key_values=DynamicCache()),
        ValueError,
        "past_key_values cannot be used with bidirectional=True",
    ),
    (
        "a mask of the new tokens and some of the old",
        lambda: model()(IDS, mask(2, 9), past_key_values=filled()),
        ValueError,
        r"attention_mask .*\(2, 12\), got \(2, 9\): 6 tokens are in the cache, 6 are given",
    ),
    (
        "crop without a recorded past",
        lambda: filled("longhorn").crop(-2),
        RuntimeError,
        "crop needs the recorded past: call `activate_past_recording",
    ),
    (
        "crop of a positive number",
        lambda: filled("longhorn").layers[0].crop(2),
        ValueError,
        "tokens_to_remove=2 must be negative",
    ),
    ("crop beyond the recorded past", lambda: crop_too_much(), ValueError, "goes 9 tokens beyond the recorded past"),
    (
        "carrying a segment that keeps keys and values",
        lambda: carry_segment(filled(), torch.tensor([True, False])),
        ValueError,
        "layer 2 of past_key_values is a DynamicLayer",
    ),
    (
        "carrying a segment with one flag for two rows",
        lambda: carry_segment(filled("longhorn"), torch.tensor([True])),
        ValueError,
        r"begins must be bool of shape \(batch,\) = \(2,\)",
    ),
    (
        "keys and values given to a layer of states",
        lambda: filled("longhorn").update(torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 8), 0),
        TypeError,
        "a RecurrentStateLayer holds no keys and values",
    ),
    (
        "an encoder-decoder cache in a language model",
        lambda: model()(IDS, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache())),
        TypeError,
        "past_key_values must be .*got EncoderDecoderCache",
    ),
]


def crop_too_much() -> None:
    past = DynamicCache(config=model("longhorn").config)
    past.activate_past_recording()
    model("longhorn")(IDS, past_key_values=past)
    past.layers[0].crop(-15)


MISUSES = [misuse("cache", case) for case in CASES]
