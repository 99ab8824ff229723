"""Fields that configurations had once, and nothing set: a folder that was saved with one is read as it always was."""

from collections.abc import Mapping
from typing import Any

# model type → field → the value it always had, by which models still compute
_MIXERS = {"ssm_skip": True, "filter_emb_dim": 33, "filter_hidden_size": 64, "filter_sin_freq": 14.0}
_SPADE = {**_MIXERS, "s5_blocks": 8, "ema_activation": "silu"}
REMOVED: dict[str, dict[str, Any]] = {
    "bst": {
        **_MIXERS,
        "filter_inner_layers": 2,
        "filter_fast_decay_pct": 0.3,
        "filter_slow_decay_pct": 1.5,
        "filter_decay_target": 0.01,
        "context_init_std": 0.1,
        "context_id_std": 1.0,
        "cross_attention_inclusive": True,
        "ssm_learning_rate": 1e-3,
    },
    "longhorn": {"use_scan_norm": False},
    "spade": _SPADE,
    "spade_seq2seq": {
        **_SPADE,
        # those of a model of one stack, which no encoder-decoder could have
        "adaptive_cutoffs": None,
        "adaptive_factor": 4,
        "adaptive_dropout": 0.2,
        "causal_classifier": None,
        "paired_input": False,
        "pixel_input": False,
        "pixel_mean": 0.5,
        "pixel_std": 0.5,
    },
}
# what said no more than how a new model begins or learns: a saved one has its weights
OF_NEW_MODELS = {"context_init_std", "context_id_std", "s5_blocks", "ssm_learning_rate"}


def without_removed_fields(model_type: str, fields: Mapping[str, Any], is_saved: bool = False) -> dict[str, Any]:
    """`fields` without those that configurations of `model_type` no longer have.

    Args:
        is_saved: they are of a model that was saved; what only new models read may have had any value there.

    Raises:
        ValueError: one of these has another value than it always had, and asks for what no model computes any more.
    """
    removed = REMOVED.get(model_type, {})
    for name, value in removed.items():
        if is_saved and name in OF_NEW_MODELS:
            continue
        if name in fields and fields[name] != value:
            raise ValueError(
                f"{name}={fields[name]!r} is no longer an option of model_type={model_type!r}, whose models compute "
                f"what {name}={value!r} did; leave it out."
            )
    return {name: value for name, value in fields.items() if name not in removed}
