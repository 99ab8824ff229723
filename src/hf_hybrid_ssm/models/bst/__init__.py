"""Block-State Transformer: window attention with context from a state-space model (arXiv 2306.09539)."""

from hf_hybrid_ssm.lazy import attach

_CONFIGURATION = f"{__name__}.configuration_bst"
_MODELING = f"{__name__}.modeling_bst"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BstConfig": _CONFIGURATION,
        "BstPreTrainedModel": _MODELING,
        "BstModel": _MODELING,
        "BstForCausalLM": _MODELING,
        "BstForSequenceClassification": _MODELING,
        "BstForTokenClassification": _MODELING,
        "BstForQuestionAnswering": _MODELING,
    },
)
