"""lm-eval on checkpoints of this package, recall tasks for it, and loss by position."""

from hf_hybrid_ssm.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "evaluate": f"{__name__}.harness",
        "RECALL_TASKS": f"{__name__}.recall_tasks",
        "loss_by_position": f"{__name__}.position_loss",
        "mean_by_position": f"{__name__}.position_loss",
        "teacher_scored_generation": f"{__name__}.teacher_scored",
        "wilson_interval": f"{__name__}.intervals",
    },
)
