"""SPADE: local attention everywhere, a state-space model in the bottom layer (arXiv 2212.08136)."""

from typing import Any

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models.family import CardText, Family, PeftTargets, usual_heads

PEFT = PeftTargets(
    lora=("q_proj", "v_proj", "aggregate"),
    ia3=("k_proj", "v_proj", "fc2"),
    ia3_feed_forward=("fc2",),
)
CARD = CardText(
    name="SPADE",
    idea="All layers have window or chunk attention, which sees the nearest tokens. A state-space model in the bottom "
    "layer carries what is farther back.",
    limits="Beyond the window a token sees the past only through the bottom layer's state.",
    arxiv="2212.08136",
    title="Efficient Long Sequence Modeling via State Space Augmented Transformer",
    authors="Zuo, Simiao; Liu, Xiaodong; Jiao, Jian; Charles, Denis; Manavoglu, Eren; Zhao, Tuo; Gao, Jianfeng",
    year=2022,
)


def _layer_kinds(config: Any) -> list[str]:
    local = f"{config.attention_type} attention"
    layers = range(config.num_hidden_layers)
    return [f"{local} and {config.ssm_type}" if index in config.ssm_layers else local for index in layers]


STACK = Family(
    model_type="spade",
    package=__name__,
    config="SpadeConfig",
    base="SpadePreTrainedModel",
    heads=usual_heads("Spade", MODEL_FOR_MASKED_LM="SpadeForMaskedLM", MODEL_FOR_TEXT_ENCODING="SpadeEncoderModel"),
    peft=PEFT,
    card=CARD,
    layer_kinds=_layer_kinds,
    is_classifier=lambda config: config.pooling == "mean",
)
ENCODER_DECODER = Family(
    model_type="spade_seq2seq",
    package=__name__,
    config="SpadeSeq2SeqConfig",
    base="SpadePreTrainedModel",
    heads={
        "MODEL": "SpadeSeq2SeqModel",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM": "SpadeForConditionalGeneration",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION": "SpadeSeq2SeqForSequenceClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION": "SpadeSeq2SeqForTokenClassification",
        "MODEL_FOR_QUESTION_ANSWERING": "SpadeSeq2SeqForQuestionAnswering",
        "MODEL_FOR_TEXT_ENCODING": "SpadeSeq2SeqEncoderModel",
    },
    peft=PEFT,
    card=CARD,
    layer_kinds=_layer_kinds,
)

FAMILIES = (STACK, ENCODER_DECODER)

__getattr__, __dir__, __all__ = attach(__name__, STACK.module_of | ENCODER_DECODER.module_of)
