"""Longhorn: a recurrence that is the closed-form step of online associative recall (arXiv 2407.14207)."""

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models.longhorn.family import FAMILY

FAMILIES = (FAMILY,)

__getattr__, __dir__, __all__ = attach(__name__, FAMILY.module_of)
