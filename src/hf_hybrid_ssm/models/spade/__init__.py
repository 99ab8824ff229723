"""SPADE: local attention everywhere, a state-space model in the bottom layer (arXiv 2212.08136)."""

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models.spade.family import ENCODER_DECODER, STACK

FAMILIES = (STACK, ENCODER_DECODER)

__getattr__, __dir__, __all__ = attach(__name__, STACK.module_of | ENCODER_DECODER.module_of)
