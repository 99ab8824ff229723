"""LMU-ISA: a fixed Legendre memory, and attention among its coefficients (arXiv 2110.02402)."""

from hf_hybrid_ssm.lazy import attach

_CONFIGURATION = f"{__name__}.configuration_lmu_isa"
_MODELING = f"{__name__}.modeling_lmu_isa"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "LmuIsaConfig": _CONFIGURATION,
        "LmuIsaPreTrainedModel": _MODELING,
        "LmuIsaModel": _MODELING,
        "LmuIsaForCausalLM": _MODELING,
        "LmuIsaForSequenceClassification": _MODELING,
        "LmuIsaForTokenClassification": _MODELING,
        "LmuIsaForQuestionAnswering": _MODELING,
    },
)
