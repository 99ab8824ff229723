"""Sharing: checkpoints that carry their code, kernels that travel, what a folder holds, and model cards."""

from hf_hybrid_ssm.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "export_code": f"{__name__}.export",
        "check_contents": f"{__name__}.verify",
        "export_kernels": f"{__name__}.kernels",
        "check_folder": f"{__name__}.verify_files",
        "model_card": f"{__name__}.cards",
        "card_of_folder": f"{__name__}.cards",
    },
)
