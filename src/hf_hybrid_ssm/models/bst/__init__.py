"""Block-State Transformer: window attention with context from a state-space model (arXiv 2306.09539)."""

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models.bst.family import FAMILY

FAMILIES = (FAMILY,)

__getattr__, __dir__, __all__ = attach(__name__, FAMILY.module_of)
