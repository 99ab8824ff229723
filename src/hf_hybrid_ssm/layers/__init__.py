"""Modules built from ops. They depend on torch alone, not on transformers.

The names here are those of `hf_hybrid_ssm.modules`: layers of the families with plain arguments.
"""

from hf_hybrid_ssm.lazy import attach

LAYERS = ("BlockState", "EMA", "Hyena", "LSTM", "Lmu", "Longhorn", "S4", "S4D", "S5")

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(LAYERS, "hf_hybrid_ssm.modules"))
