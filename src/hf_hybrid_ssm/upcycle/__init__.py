"""Upcycling: a pretrained transformer becomes a student whose cache grows in few layers, or in none."""

from hf_hybrid_ssm.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Keep": f"{__name__}.choice",
        "LayerChoice": f"{__name__}.choice",
        "Teacher": f"{__name__}.teacher",
        "UpcycleReport": f"{__name__}.student",
        "alignment_losses": f"{__name__}.objectives",
        "choose_layers": f"{__name__}.choice",
        "distillation_loss": f"{__name__}.objectives",
        "fused_distillation_loss": f"{__name__}.objectives",
        "load_teacher": f"{__name__}.loading",
        "save_delta": f"{__name__}.delta",
        "tokenizer_of": f"{__name__}.delta",
        "upcycle": f"{__name__}.student",
    },
)
