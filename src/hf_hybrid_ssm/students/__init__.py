"""Students of pretrained transformers: their teachers' own classes, with another attention."""

from hf_hybrid_ssm.lazy import attach

MODEL_TYPE, CONFIG = "hybrid_student", "HybridStudentConfig"
HEADS = {"MODEL": "HybridStudentModel", "MODEL_FOR_CAUSAL_LM": "HybridStudentForCausalLM"}
REGISTERED = (MODEL_TYPE, __name__, CONFIG, HEADS)
"""What transformers' Auto classes are told."""

__getattr__, __dir__, __all__ = attach(
    __name__,
    {CONFIG: f"{__name__}.configuration"} | dict.fromkeys(HEADS.values(), f"{__name__}.modeling"),
)
