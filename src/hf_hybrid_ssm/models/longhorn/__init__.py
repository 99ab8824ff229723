"""Longhorn: a recurrence that is the closed-form step of online associative recall (arXiv 2407.14207)."""

from hf_hybrid_ssm.lazy import attach

_CONFIGURATION = f"{__name__}.configuration_longhorn"
_MODELING = f"{__name__}.modeling_longhorn"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "LonghornConfig": _CONFIGURATION,
        "LonghornPreTrainedModel": _MODELING,
        "LonghornModel": _MODELING,
        "LonghornForCausalLM": _MODELING,
        "LonghornForSequenceClassification": _MODELING,
        "LonghornForTokenClassification": _MODELING,
        "LonghornForQuestionAnswering": _MODELING,
    },
)
