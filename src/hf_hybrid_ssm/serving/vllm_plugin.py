"""What vLLM calls when it starts (the entry point `vllm.general_plugins`): its registry learns the language models.

Nothing here is imported without vLLM, and the model class only when an engine asks for it.
"""

import logging

logger = logging.getLogger(__name__)

# `make vllm` runs tests/serving/engine with the last; with the first they passed before
TESTED_VERSIONS = ("0.29.0", "0.32.0")
MODEL = "hf_hybrid_ssm.serving.vllm_model:PagedHybridForCausalLM"


def register() -> None:
    """Make the language models of all families known to vLLM; calling it again changes nothing."""
    import vllm
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from hf_hybrid_ssm.models import FAMILIES, OTHERS
    from hf_hybrid_ssm.serving.vllm_checks import PagedHybridConfig

    names = [name for family in (*FAMILIES, *OTHERS) if (name := family.heads.get("MODEL_FOR_CAUSAL_LM")) is not None]
    if all(name in MODELS_CONFIG_MAP for name in names):
        return
    version = vllm.__version__.partition("+")[0]
    if version not in TESTED_VERSIONS:
        logger.warning(
            "hf_hybrid_ssm was tested with vLLM %s, and this is %s.", ", ".join(TESTED_VERSIONS), vllm.__version__
        )
    for name in names:
        ModelRegistry.register_model(name, MODEL)
        MODELS_CONFIG_MAP[name] = PagedHybridConfig
