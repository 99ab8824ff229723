"""Students of pretrained transformers: their teachers' own classes, with another attention."""

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models.family import PeftTargets

MODEL_TYPE, CONFIG = "hybrid_student", "HybridStudentConfig"
HEADS = {"MODEL": "HybridStudentModel", "MODEL_FOR_CAUSAL_LM": "HybridStudentForCausalLM"}
REGISTERED = (MODEL_TYPE, __name__, CONFIG, HEADS)
"""What transformers' Auto classes are told."""
PEFT = PeftTargets(
    lora=("q_proj", "v_proj", "qkv_proj", "query_key_value", "in_proj", "out_proj"),
    ia3=("k_proj", "v_proj", "qkv_proj", "query_key_value", "out_proj", "down_proj"),
    ia3_feed_forward=("out_proj", "down_proj"),
)
OF_PEFT = (MODEL_TYPE, PEFT)
"""PEFT's defaults: of these names, those that a teacher has."""

__getattr__, __dir__, __all__ = attach(
    __name__,
    {CONFIG: f"{__name__}.configuration"} | dict.fromkeys(HEADS.values(), f"{__name__}.modeling"),
)
