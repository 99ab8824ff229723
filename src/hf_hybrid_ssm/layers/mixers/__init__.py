"""Every long-range mixer, by its name in a configuration."""

from hf_hybrid_ssm.layers.mixers.registry import MIXERS, build_mixer, register_mixer

__all__ = ["MIXERS", "build_mixer", "register_mixer"]
