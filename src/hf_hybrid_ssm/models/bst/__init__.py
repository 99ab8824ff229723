"""Block-State Transformer: window attention with context from a state-space model (arXiv 2306.09539)."""

from typing import Any

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models.family import CardText, Family, PeftTargets, usual_heads


def _layer_kinds(config: Any) -> list[str]:
    words = {
        "bst": f"window attention and context states ({config.context_variant.upper()}, {config.ssm_type})",
        "block_recurrent": "block-recurrent attention",
        "window_attention": "window attention",
    }
    return [words[kind] for kind in config.layer_types]


FAMILY = Family(
    model_type="bst",
    package=__name__,
    config="BstConfig",
    base="BstPreTrainedModel",
    heads=usual_heads("Bst", MODEL_FOR_MASKED_LM="BstForMaskedLM"),
    # "attention." tells the maps of the tokens from those of the context states, one variant of which has no nn.Linear
    peft=PeftTargets(
        lora=("attention.q_proj", "attention.v_proj", "attention.context_q_proj"),
        ia3=("attention.k_proj", "attention.v_proj", "fc2", "down_proj"),
        ia3_feed_forward=("fc2", "down_proj"),
    ),
    card=CardText(
        name="Block-State Transformer",
        idea="Attention within blocks and their window. In some layers a state-space model reads the whole sequence, "
        "and each block also attends to its outputs, the context states.",
        limits="Beyond the window a token sees the past only through the context states.",
        arxiv="2306.09539",
        title="Block-State Transformers",
        authors="Pilault, Jonathan; Fathi, Mahan; Firat, Orhan; Pal, Christopher; Bacon, Pierre-Luc; Goroshin, Ross",
        year=2023,
        venue="Advances in Neural Information Processing Systems",
    ),
    layer_kinds=_layer_kinds,
    is_classifier=lambda config: config.bidirectional,
)

FAMILIES = (FAMILY,)

__getattr__, __dir__, __all__ = attach(__name__, FAMILY.module_of)
