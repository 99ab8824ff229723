"""The declaration of students: one model type for those of all teachers."""

from typing import Any

from hf_hybrid_ssm.models.family import CardText, Family, PeftTargets

BESIDE = {None: "", "longhorn": ", a Longhorn mixer beside it", "context": ", context states beside it"}
OF_TEACHER = {"full": "full attention", "none": "the teacher's own, without attention"}


def _layer_kinds(config: Any) -> list[str]:
    kinds = []
    for layer in config.plan.layers:
        if not layer.is_windowed:
            kinds.append(OF_TEACHER[layer.attention] if layer.memory is None else "Longhorn")
            continue
        windows = "full attention in some heads, window attention in the others" if layer.groups else "window attention"
        kinds.append(windows + BESIDE[layer.memory])
    return kinds


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
