"""LMU-ISA: a fixed Legendre memory, and attention among its coefficients (arXiv 2110.02402)."""

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models.lmu_isa.family import FAMILY

FAMILIES = (FAMILY,)

__getattr__, __dir__, __all__ = attach(__name__, FAMILY.module_of)
