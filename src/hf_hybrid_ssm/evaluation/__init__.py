"""lm-eval on checkpoints of this package."""

from hf_hybrid_ssm.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"evaluate": f"{__name__}.harness"})
