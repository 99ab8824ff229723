"""Every long-range mixer, by its name in a configuration."""

from hf_hybrid_ssm.lazy import attach

REGISTRY = "hf_hybrid_ssm.layers.mixers.registry"

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(("MIXERS", "build_mixer", "register_mixer"), REGISTRY))
