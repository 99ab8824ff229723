"""The tiny models that programs run on, with weights drawn so that every part matters, and their float64 twins."""

import copy
import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from hf_hybrid_ssm import SpadeEncoderModel
from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.students.sinks import ConstantSink

VOCABULARY = 23
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONGHORN = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 3, "num_attention_heads": 2, "sliding_window": 5}
SPADE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SPADE |= {"sliding_window": 5, "chunk_size": 4, "ssm_state_size": 4, "filter_length": 16}
SPADE |= {"relative_attention_num_buckets": 8}
SPADE |= {"relative_attention_max_distance": 6}
BST = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 16}
BST |= {
    "sliding_window": 4,
    "layer_types": ["bst", "window_attention"],
    "num_context_states": 3,
    "recurrent_num_states": 3,
}
BST |= {
    "ssm_state_size": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "filter_length": 16,
}
STUDENT = {"teacher_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
STUDENT |= {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
WINDOW, FULL = {"attention": "window", "window": 4, "sink": "constant"}, {"attention": "full"}
LMU = {"hidden_size": 12, "num_hidden_layers": 2, "lmu_order": 6, "lmu_reduced_order": 3, "lmu_theta": 8.0}
LMU |= {"pre_intermediate_size": 16, "post_intermediate_size": 16, "num_attention_heads": 2, "sliding_window": 5}

CAUSAL_HEADS = ("base", "lm", "lm", "sequence", "token", "span")  # most use is that of the language model
BIDIRECTIONAL_HEADS = ("base", "sequence", "token", "span")


@dataclass(frozen=True)
class Variant:
    """A family's configuration, and what a program may do with it.

    Args:
        family: as the report counts it.
        model_type: of the configuration.
        fields: of the configuration.
        heads: to draw from.
        is_causal: False: a token sees what follows, and there is no cache.
        has_full_attention: some layers of the cache are transformers' own, of keys and values.
        has_states: some are ours, which also keep where documents begin and what was padding.
    """

    family: str
    model_type: str
    fields: dict
    heads: tuple[str, ...] = CAUSAL_HEADS
    is_causal: bool = True
    has_full_attention: bool = False
    has_states: bool = True

    @property
    def has_encoder(self) -> bool:
        return self.model_type == "spade_seq2seq"


def _longhorn(*layer_types: str, **fields) -> Variant:
    blocks = {"linear": "longhorn", "sliding": "window_attention", "full": "full_attention"}
    fields |= {"layer_types": [blocks[name] for name in layer_types], "num_hidden_layers": len(layer_types)}
    return Variant(
        "longhorn",
        "longhorn",
        LONGHORN | fields,
        has_full_attention="full" in layer_types,
        has_states=set(layer_types) != {"full"},
    )


def _student(*layers: dict, **beside) -> Variant:
    plan = {"student": {"layers": list(layers), **beside}, "num_hidden_layers": len(layers)}
    is_full = [layer["attention"] == "full" for layer in layers]
    return Variant(
        "student",
        "hybrid_student",
        STUDENT | plan,
        ("base", "lm", "lm"),
        has_full_attention=any(is_full),
        has_states=not all(is_full),
    )


def _spade(**fields) -> Variant:
    return Variant("spade", "spade", SPADE | fields, ("base", "lm", "lm"))


def _encoder(**fields) -> Variant:
    return Variant("spade encoder", "spade", SPADE | fields, BIDIRECTIONAL_HEADS, is_causal=False)


def _bst(**fields) -> Variant:
    return Variant("bst", "bst", BST | fields)


def _seq2seq(**fields) -> Variant:
    fields = SPADE | {"num_decoder_layers": 2} | fields
    return Variant("spade seq2seq", "spade_seq2seq", fields, ("base", "lm", "lm"))


MIXERS = ("s4", "s4d", "s5", "hyena", "ema", "lstm")
RELATIVE = {"decoder_position_embedding_type": "relative"}
VARIANTS: dict[str, Variant] = {
    "longhorn": _longhorn("linear", "linear"),
    "longhorn conv of 2": _longhorn("linear", "linear", conv_kernel=2),
    "longhorn sliding": _longhorn("linear", "sliding", num_key_value_heads=1, mlp_intermediate_size=16),
    "longhorn sliding first": _longhorn("sliding", "linear"),
    "longhorn full": _longhorn("linear", "full", num_key_value_heads=1),
    "longhorn full first": _longhorn("full", "linear"),
    "longhorn full alone": _longhorn("full", "full"),
    "longhorn all": _longhorn("linear", "sliding", "full", mlp_intermediate_size=16),
    **{
        f"spade {mixer} {attention}": _spade(ssm_type=mixer, attention_type=attention)
        for mixer in MIXERS
        for attention in ("window", "chunk")
    },
    "spade s4 full": _spade(attention_type="full", ssm_layers=[0, 1]),
    "spade s5 stack post": _spade(ssm_type="s5", ssm_merge="stack", norm_position="post"),
    "spade ema add full": _spade(
        ssm_type="ema", ssm_merge="add", attention_type="full", relative_bias_scope="per_layer"
    ),
    "spade adaptive": _spade(adaptive_cutoffs=[8, 14], adaptive_factor=2, norm_type="scalenorm"),
    "spade seq2seq learned full": _seq2seq(),
    "spade seq2seq window s4": _seq2seq(decoder_attention_type="window", decoder_ssm_layers=[0], **RELATIVE),
    "spade seq2seq chunk s5": _seq2seq(
        decoder_attention_type="chunk", decoder_ssm_layers=[1], ssm_type="s5", **RELATIVE
    ),
    "spade encoder window": _encoder(),
    "spade encoder chunk s5": _encoder(ssm_type="s5", attention_type="chunk", pooling="mean"),
    "spade encoder full lstm": _encoder(ssm_type="lstm", attention_type="full", norm_position="post"),
    "spade encoder hyena": _encoder(ssm_type="hyena", pooling="mean", ssm_merge="add"),
    "bst sh s4d": _bst(),
    "bst sh s5": _bst(ssm_type="s5"),
    "bst mh s4": _bst(context_variant="mh", ssm_type="s4", layer_types=["window_attention", "bst"]),
    "bst mf unstructured": _bst(context_variant="mf", ssm_type="unstructured"),
    "bst mf s4d": _bst(context_variant="mf", qk_norm=False, attend_self=True),
    "bst slide": _bst(layer_types=["window_attention", "window_attention"], zero_kv_sink=False),
    "bst both": _bst(layer_types=["block_recurrent", "bst"], zero_kv_sink=False),
    "bst block-recurrent": _bst(layer_types=["block_recurrent", "window_attention"]),
    "bst retrieval sh": _bst(retrieval_k=2, retrieval_memory=5, retrieval_stride=2),
    "bst retrieval mf": _bst(context_variant="mf", retrieval_k=2, retrieval_memory=5),
    "bst bidirectional": Variant("bst", "bst", BST | {"bidirectional": True}, BIDIRECTIONAL_HEADS, is_causal=False),
    "student windows": _student(WINDOW, {**WINDOW, "sink": None}),
    "student first token": _student({**WINDOW, "sink": "first_token"}, WINDOW),
    "student full": _student(WINDOW, FULL, attn_scale=0.5, floor_scale=3),
    "student groups": _student({**WINDOW, "groups": [1]}, {**WINDOW, "groups": [0]}, attn_scale=0.5, floor_scale=3),
    "student mixer": _student({**WINDOW, "memory": "longhorn"}, {"attention": "none", "memory": "longhorn"}),
    "student context": _student({**WINDOW, "memory": "context"}, WINDOW, memory={"ssm_state_size": 4}),
    "lmu-isa": Variant("lmu-isa", "lmu_isa", LMU),
    "lmu-isa global": Variant("lmu-isa", "lmu_isa", LMU | {"first_sublayer": "global_attention"}),
    "lmu-isa window": Variant("lmu-isa", "lmu_isa", LMU | {"first_sublayer": "window_attention"}),
}
FAMILIES = tuple(dict.fromkeys(variant.family for variant in VARIANTS.values()))
AUTO = {
    "base": AutoModel,
    "lm": AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "span": AutoModelForQuestionAnswering,
}


@lru_cache(maxsize=256)
def build(name: str, head: str, dtype: str) -> PreTrainedModel:
    """The model of a variant in evaluation mode; the same weights in every dtype."""
    if dtype == "float64":
        return copy.deepcopy(build(name, head, "float32")).double()
    variant = VARIANTS[name]
    config = AutoConfig.for_model(variant.model_type, **TOKENS | {"num_labels": 3} | variant.fields)
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    if head == "base" and not variant.is_causal and variant.model_type == "spade":
        model = SpadeEncoderModel(config)
    elif head == "lm" and variant.has_encoder:
        model = AutoModelForSeq2SeqLM.from_config(config)
    else:
        model = AUTO[head].from_config(config)
    _draw_weights(model, torch.Generator().manual_seed(seed))
    return model.eval()


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    """No map near zero, no bias zero; the state-space models stay as their papers initialise them."""
    inside = {id(part) for module in model.modules() if isinstance(module, Mixer) for part in module.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(std=0.3, generator=generator)
        elif isinstance(module, ConstantSink):
            for parameter in module.parameters():
                parameter.normal_(generator=generator)
        elif isinstance(module, RelativeBias):
            module.weight.normal_(std=0.7, generator=generator)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=1.0, generator=generator)
