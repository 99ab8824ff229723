"""LMU-ISA: a fixed Legendre memory, and attention among its coefficients (arXiv 2110.02402)."""

from typing import Any

from hf_hybrid_ssm.lazy import attach
from hf_hybrid_ssm.models.family import CardText, Family, PeftTargets, usual_heads


def _layer_kinds(config: Any) -> list[str]:
    first = {"ffn": "feed-forward"}.get(config.first_sublayer, config.first_sublayer.replace("_", " "))
    return [f"{first}, Legendre memory, implicit attention"] * config.num_hidden_layers


FAMILY = Family(
    model_type="lmu_isa",
    package=__name__,
    config="LmuIsaConfig",
    base="LmuIsaPreTrainedModel",
    heads=usual_heads("LmuIsa"),
    peft=PeftTargets(
        lora=("fc1", "fc2", "q_proj", "v_proj"),
        ia3=("k_proj", "v_proj", "fc2"),
        ia3_feed_forward=("fc2",),
    ),
    card=CardText(
        name="LMU-ISA",
        idea="A fixed Legendre Memory Unit keeps a sliding window of each channel in a few coefficients. "
        "Attention works among the coefficients of one time step instead of among time steps.",
        limits="The memory is a smoothed window of `lmu_theta` tokens: older tokens fade, and sharp detail is lost.",
        arxiv="2110.02402",
        title="Language Modeling using LMUs: 10x Better Data Efficiency or Improved Scaling Compared to Transformers",
        authors="Chilkuri, Narsimha; Hunsberger, Eric; Voelker, Aaron; Malik, Gurshaant; Eliasmith, Chris",
        year=2021,
    ),
    layer_kinds=_layer_kinds,
)

FAMILIES = (FAMILY,)

__getattr__, __dir__, __all__ = attach(__name__, FAMILY.module_of)
