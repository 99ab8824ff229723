"""SPADE: local attention everywhere, a state-space model in the bottom layer (arXiv 2212.08136)."""

from hf_hybrid_ssm.lazy import attach

_CONFIGURATION = f"{__name__}.configuration_spade"
_MODELING = f"{__name__}.modeling_spade"
_SEQ2SEQ = f"{__name__}.modeling_spade_seq2seq"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "SpadeConfig": _CONFIGURATION,
        "SpadeSeq2SeqConfig": _CONFIGURATION,
        "SpadePreTrainedModel": _MODELING,
        "SpadeModel": _MODELING,
        "SpadeForCausalLM": _MODELING,
        "SpadeEncoderModel": _MODELING,
        "SpadeForSequenceClassification": _MODELING,
        "SpadeForTokenClassification": _MODELING,
        "SpadeForQuestionAnswering": _MODELING,
        "SpadeSeq2SeqModel": _SEQ2SEQ,
        "SpadeSeq2SeqEncoderModel": _SEQ2SEQ,
        "SpadeSeq2SeqForSequenceClassification": _SEQ2SEQ,
        "SpadeSeq2SeqForTokenClassification": _SEQ2SEQ,
        "SpadeSeq2SeqForQuestionAnswering": _SEQ2SEQ,
        "SpadeForConditionalGeneration": _SEQ2SEQ,
    },
)
