"""Longhorn: a recurrence that is the closed-form step of online associative recall (arXiv 2407.14207)."""

from typing import Any

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models.family import CardText, Family, PeftTargets, Shapes, usual_heads


def _layer_kinds(config: Any) -> list[str]:
    words = {"longhorn": "Longhorn", "window_attention": "window attention"}
    return [words.get(kind, "full attention") for kind in config.layer_types]


def _recurrent_states(config: Any) -> Shapes:
    return {
        "conv": (config.conv_kernel - 1, config.intermediate_size),
        "scan": (config.intermediate_size, config.state_size),
    }


FAMILY = Family(
    model_type="longhorn",
    package=__name__,
    config="LonghornConfig",
    base="LonghornPreTrainedModel",
    heads=usual_heads("Longhorn"),
    peft=PeftTargets(
        lora=("in_proj", "out_proj", "q_proj", "v_proj"),
        ia3=("out_proj", "k_proj", "v_proj", "down_proj"),
        ia3_feed_forward=("out_proj", "down_proj"),
    ),
    card=CardText(
        name="Longhorn",
        idea="Blocks like Mamba's. The recurrence is the closed-form step of online associative recall: each token "
        "changes the state so that its key recalls its value.",
        memory="The state has one size, however long the text.",
        limits="The model forgets what no longer fits the state. Do not expect exact copies of long passages.",
        arxiv="2407.14207",
        title="Longhorn: State Space Models are Amortized Online Learners",
        authors="Liu, Bo; Wang, Rui; Wu, Lemeng; Feng, Yihao; Stone, Peter; Liu, Qiang",
        year=2025,
        venue="International Conference on Learning Representations",
    ),
    layer_kinds=_layer_kinds,
    recurrent_states=_recurrent_states,
)

FAMILIES = (FAMILY,)

__getattr__, __dir__, __all__ = attach(__name__, FAMILY.module_of)
