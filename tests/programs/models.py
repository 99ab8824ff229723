"""The tiny models that all tests share, with weights drawn so that every part matters, and their float64 twins."""

import copy
import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

import hf_hybrid_ssm
from hf_hybrid_ssm import students
from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.students.sinks import ConstantSink
from tests.tiny_models import BST, EVERY, HEADS_OF, LONGHORN, RARER, RELATIVE, SEQ2SEQ, STUDENTS, TOKENS

VOCABULARY = TOKENS["vocab_size"]
OWN: dict[str, tuple[str, dict]] = {
    "longhorn, full attention alone": ("longhorn", {**LONGHORN, "layer_types": ["full_attention"] * 3}),
    "bst mf with memory": ("bst", {**BST, "context_variant": "mf", "retrieval_k": 2, "retrieval_memory": 5}),
    "encoder-decoder relative chunk": (
        "spade_seq2seq",
        {**SEQ2SEQ, **RELATIVE, "ssm_type": "s5", "attention_type": "chunk", "decoder_attention_type": "chunk"},
    ),
}
ENCODERS = ("spade s4 window", "spade s5 chunk post-norm", "spade hyena full", "spade lstm")
CAUSAL_HEADS = ("base", "lm", "lm", "sequence", "token", "span")  # most use is that of the language model
HEADS = {
    "base": "MODEL",
    "lm": "MODEL_FOR_CAUSAL_LM",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "span": "MODEL_FOR_QUESTION_ANSWERING",
}


@dataclass(frozen=True)
class Variant:
    """A family's configuration, and what a program may do with it.

    Args:
        family: whose programs are drawn together.
        model_type: of the configuration.
        fields: of the configuration.
        is_causal: False: a token sees what follows, and there is no cache.
    """

    family: str
    model_type: str
    fields: dict
    is_causal: bool = True

    @property
    def heads(self) -> tuple[str, ...]:
        """To draw from; SPADE's classifiers are encoders."""
        if not self.is_causal:
            return ("base", "sequence", "token", "span")
        return CAUSAL_HEADS[:3] if self.model_type in ("spade", "spade_seq2seq", STUDENTS) else CAUSAL_HEADS

    @property
    def has_encoder(self) -> bool:
        return self.model_type == "spade_seq2seq"

    @property
    def _has_full_layers(self) -> set[bool]:
        """Whether layers of the cache are transformers' own, of keys and values."""
        if self.model_type == STUDENTS:
            return {layer["attention"] == "full" for layer in self.fields["student"]["layers"]}
        return {kind == "full_attention" for kind in self.fields.get("layer_types") or [""]}

    @property
    def has_full_attention(self) -> bool:
        return True in self._has_full_layers

    @property
    def has_states(self) -> bool:
        """Whether some layers are ours, which also keep where documents begin and what was padding."""
        return False in self._has_full_layers


VARIANTS = {
    name: Variant(model_type, model_type, fields, not fields.get("bidirectional"))
    for name, (model_type, fields) in (EVERY | RARER | OWN).items()
}
VARIANTS |= {f"{name}, encoder": Variant("encoder", "spade", EVERY[name][1], is_causal=False) for name in ENCODERS}
FAMILIES = tuple(dict.fromkeys(variant.family for variant in VARIANTS.values()))


@lru_cache(maxsize=256)
def build(name: str, head: str, dtype: str) -> PreTrainedModel:
    """The model of a variant in evaluation mode; the same weights in every dtype."""
    if dtype == "float64":
        return copy.deepcopy(build(name, head, "float32")).double()
    variant = VARIANTS[name]
    config = AutoConfig.for_model(variant.model_type, **TOKENS | {"num_labels": 3} | variant.fields)
    heads, kind = HEADS_OF[variant.model_type], HEADS[head]
    if name.endswith(", encoder") and head == "base":
        kind = "MODEL_FOR_TEXT_ENCODING"
    elif variant.has_encoder and head == "lm":
        kind = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM"
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    model = getattr(students if variant.model_type == STUDENTS else hf_hybrid_ssm, heads[kind])(config)
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
