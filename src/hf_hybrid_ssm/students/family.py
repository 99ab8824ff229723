"""The declaration of students: one model type for those of all teachers."""

from typing import Any

from hf_hybrid_ssm.models.family import Family, PeftTargets

WITHOUT_ATTENTION = "the teacher's own, without attention"
BESIDE = {None: "", "longhorn": ", Longhorn beside it", "context": ", context states beside it"}


def _layer_kinds(config: Any) -> list[str]:
    return [_kind(layer) for layer in config.plan.layers]


def _kind(layer: Any) -> str:
    if layer.attention == "full":
        return "full attention"
    if not layer.is_windowed:
        return WITHOUT_ATTENTION if layer.memory is None else "Longhorn"
    windows = "full attention in some heads, window attention in the others" if layer.groups else "window attention"
    return windows + BESIDE[layer.memory]


FAMILY = Family(
    model_type="hybrid_student",
    package="hf_hybrid_ssm.students",
    config="HybridStudentConfig",
    base="StudentMixin",
    heads={"MODEL": "HybridStudentModel", "MODEL_FOR_CAUSAL_LM": "HybridStudentForCausalLM"},
    modules=("configuration", "modeling"),
    # of these names, those that a teacher has
    peft=PeftTargets(
        lora=("q_proj", "v_proj", "qkv_proj", "query_key_value", "in_proj", "out_proj"),
        ia3=("k_proj", "v_proj", "qkv_proj", "query_key_value", "out_proj", "down_proj"),
        ia3_feed_forward=("out_proj", "down_proj"),
    ),
    card=None,
    layer_kinds=_layer_kinds,
)
