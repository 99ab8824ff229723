"""What has been read, kept outside of a forward: contexts in files, and states in a server's pages."""

from hf_hybrid_ssm.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Context": f"{__name__}.context",
        "PrefixCache": f"{__name__}.prefix_cache",
        "load_context": f"{__name__}.context",
        "save_context": f"{__name__}.context",
    },
)
