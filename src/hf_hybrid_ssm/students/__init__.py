"""Students of pretrained transformers: their teachers' own classes, with another attention."""

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.students.family import FAMILY

__getattr__, __dir__, __all__ = attach(__name__, FAMILY.module_of)
