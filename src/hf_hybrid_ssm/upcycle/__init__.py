"""Upcycling: a pretrained transformer becomes a hybrid whose memory grows in few layers, or in none."""

from hf_hybrid_ssm.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "KEEP_BY": f"{__name__}.choice",
        "LayerChoice": f"{__name__}.choice",
        "LayerRanking": f"{__name__}.layer_ranking",
        "NoRecallError": f"{__name__}.recall",
        "RecallPrompt": f"{__name__}.probe_prompts",
        "RecallScore": f"{__name__}.layer_ranking",
        "UpcycleReport": f"{__name__}.student",
        "STUDENT_FAMILIES": f"{__name__}.configurations",
        "alignment_losses": f"{__name__}.objectives",
        "attention_sensitivity": f"{__name__}.sensitivity",
        "beyond_window": f"{__name__}.objectives",
        "check_teacher": f"{__name__}.teachers",
        "check_weights": f"{__name__}.teacher_weights",
        "choose_layers": f"{__name__}.choice",
        "distillation_loss": f"{__name__}.objectives",
        "evenly_spaced": f"{__name__}.configurations",
        "fused_distillation_loss": f"{__name__}.objectives",
        "has_plain_head": f"{__name__}.objectives",
        "init_context": f"{__name__}.context_states",
        "init_from_attention": f"{__name__}.projections",
        "load_teacher": f"{__name__}.loading",
        "load_teacher_model": f"{__name__}.loading",
        "new_modules": f"{__name__}.student",
        "rank_layers_by_kl": f"{__name__}.divergence",
        "rank_layers_by_recall": f"{__name__}.recall",
        "recall_of": f"{__name__}.recall",
        "recall_prompts": f"{__name__}.probe_prompts",
        "save_delta": f"{__name__}.delta",
        "student_config": f"{__name__}.configurations",
        "upcycle": f"{__name__}.student",
    },
)
