"""Upcycling: a pretrained transformer becomes a Longhorn hybrid with fewer attention layers."""

from hf_hybrid_ssm.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Carried": f"{__name__}.student",
        "alignment_losses": f"{__name__}.objectives",
        "attention_sensitivity": f"{__name__}.sensitivity",
        "check_teacher": f"{__name__}.teachers",
        "distillation_loss": f"{__name__}.objectives",
        "evenly_spaced": f"{__name__}.student",
        "init_from_attention": f"{__name__}.projections",
        "student_config": f"{__name__}.student",
        "upcycle": f"{__name__}.student",
    },
)
