"""The configuration of a student, from that of its teacher."""

import copy
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import WINDOW_BLOCK_TYPES, LonghornConfig
from hf_hybrid_ssm.upcycle.layer_ranking import number_kept
from hf_hybrid_ssm.upcycle.teachers import attention_types, check_teacher, has_attention_bias, head_dim_of

SHARED_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "initializer_range", "tie_word_embeddings", "attention_dropout",
    "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
STUDENT_FAMILIES = ("longhorn", "bst")
OTHERS = ("linear_attention", "sliding_attention", "hybrid_sliding")
WINDOW = 512
"""Tokens of a student's windows where its teacher has none."""
ATTN_SCALE = 0.1
"""As in Llama 4."""
SETTABLE_FIELDS = {
    "max_position_embeddings", "initializer_range", "attention_dropout", "dropout", "final_dropout", "sliding_window",
    "ssm_layers", "pad_token_id", "bos_token_id", "eos_token_id",
}  # fmt: skip
"""What may be chosen of the fields that a BST takes from its teacher."""
FIXED_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "mlp_intermediate_size", "attention_bias", "use_qk_norm", "tie_word_embeddings",
)  # fmt: skip
"""What a Longhorn takes from its teacher, whatever is asked: its weights fit nothing else."""


def evenly_spaced(layers: int, count: int) -> list[int]:
    """`count` of `layers` layers, each in the middle of its share: the states of earlier layers feed them."""
    return [(2 * index + 1) * layers // (2 * count) for index in range(count)]


def parts_of(keep: Sequence[Any], teacher: PreTrainedConfig) -> list[Any]:
    """A list of layers, or of key/value groups as (layer, group), in ascending order; each once.

    Raises:
        ValueError: the teacher has no such layer or group, or the list has both.
    """
    layers, groups = teacher.num_hidden_layers, teacher.num_key_value_heads
    parts = [tuple(part) if isinstance(part, list) else part for part in keep]
    pairs = [part for part in parts if isinstance(part, tuple)]
    if pairs and len(pairs) < len(parts):
        raise ValueError(f"keep={list(keep)} names layers and key/value groups: give one kind.")
    if pairs:
        known = {(layer, group) for layer in range(layers) for group in range(groups)}
        if unknown := sorted(set(pairs) - known, key=str):
            raise ValueError(
                f"keep={list(keep)} names {unknown}, but the teacher's layers are 0 to {layers - 1}, each with the "
                f"key/value groups 0 to {groups - 1}: a group is (layer, group)."
            )
    elif unknown := sorted(set(parts) - set(range(layers)), key=str):
        raise ValueError(f"keep={list(keep)} names {unknown}, but the teacher's layers are 0 to {layers - 1}.")
    return sorted(set(parts))


def student_config(
    teacher: PreTrainedConfig,
    keep: float | Sequence[Any] | None = None,
    keep_as: str | None = None,
    family: str = "longhorn",
    others_as: str | None = None,
    **fields: Any,
) -> LonghornConfig | BstConfig:
    """The configuration of a hybrid with the teacher's sizes.

    Args:
        teacher: of a Llama, Mistral, Qwen2 or Qwen3.
        keep: the layers of a Longhorn hybrid that keep their attention: their indices, or how many (int) or which
            share of all layers (float), evenly spaced; a quarter by default. `choose_layers` chooses better ones. Or
            single key/value groups with full attention, as (layer, group); the others see a window.
        keep_as: "full_attention" or "sliding_attention" for the layers that keep it; None: as in the teacher.
        family: "longhorn", or "bst": all layers keep their attention as a window.
        others_as: what the other layers of a Longhorn hybrid become: "linear_attention", a mixer in the place of
            attention (the default); "sliding_attention", the attention within a window; or "hybrid_sliding", such a
            window and beside it a mixer with the attention's heads.
        fields: of the student's configuration. For Longhorn such as `state_size` (32 by default, the attention's size
            of a head beside it) and `sliding_window` (of the teacher's windows, or 512). For BST such as
            `sliding_window`, the tokens that a token sees before itself (by default those of the teacher's windows,
            or 512), and `ssm_layers`, which get context states (by default a quarter, evenly spaced). For both
            `attention_sink`: "constant" by default where windows take the place of attention to all tokens, or None.
            For a Longhorn with such windows beside kept full attention `attn_scale`, 0.1 by default: few layers find
            one token among many with sharper queries; what the window sees whole stays the teacher's.

    Raises:
        ValueError: the teacher cannot be upcycled, there is no such layer, or the family has no use for an argument.
    """
    check_teacher(teacher)
    if family not in STUDENT_FAMILIES:
        raise ValueError(f"family={family!r} must be one of {', '.join(map(repr, STUDENT_FAMILIES))}.")
    known = {name: getattr(teacher, name) for name in SHARED_FIELDS if hasattr(teacher, name)}
    known |= {
        "head_dim": head_dim_of(teacher),
        "layer_norm_epsilon": teacher.rms_norm_eps,
        "rope_parameters": copy.deepcopy(teacher.rope_parameters),
        "attention_bias": has_attention_bias(teacher),
        "use_qk_norm": teacher.model_type == "qwen3",
    }
    if family == "bst":
        if keep is not None or keep_as is not None or others_as is not None:
            raise ValueError(
                f"keep={keep}, keep_as={keep_as} and others_as={others_as} are for Longhorn: in a BST all layers keep "
                "their attention as a window. Give sliding_window, and ssm_layers for those with context states."
            )
        known |= _bst_fields(teacher, fields)
        if fixed := sorted(fields.keys() & known.keys() - SETTABLE_FIELDS):
            raise ValueError(f"{', '.join(fixed)} of a BST must be its teacher's: the weights fit nothing else.")
        known |= _sink_fields(teacher, ["sliding_attention"], fields)
        windows = ["sliding_attention"] * teacher.num_hidden_layers
        _check_reach(teacher, windows, (known | fields).get("sliding_window", WINDOW), uncounted=1)
        return _without_idle_limit(BstConfig(**(known | fields)), fields)
    keep = 0.25 if keep is None else keep
    if isinstance(keep, int | float):
        layers = teacher.num_hidden_layers
        keep = evenly_spaced(layers, number_kept(keep, layers))
    keep = parts_of(keep, teacher)
    if keep and isinstance(keep[0], tuple):
        known |= _fields_of_groups(teacher, keep, keep_as, others_as)
    else:
        known |= _longhorn_fields(teacher, keep, keep_as, others_as or "linear_attention")
    if other := [name for name in FIXED_FIELDS if name in fields and fields[name] != known[name]]:
        wanted = ", ".join(f"{name}={known[name]!r}" for name in other)
        raise ValueError(f"{', '.join(other)} of a Longhorn must be its teacher's: {wanted}.")
    known |= _sink_fields(teacher, fields.get("block_types", known["block_types"]), fields)
    types = fields.get("block_types", known["block_types"])
    _check_reach(teacher, types, (known | fields).get("sliding_window"))
    has_both = known.get("attention_sink") is not None and {"full_attention", "mixed_attention"} & set(types)
    if has_both and fields.get("attn_scale", ATTN_SCALE):
        known |= {"attn_scale": ATTN_SCALE, "floor_scale": fields.get("sliding_window", known["sliding_window"]) + 1}
    return _without_idle_limit(LonghornConfig(**(known | fields)), fields)


def _check_reach(teacher: Any, block_types: Sequence[str], window: int | None, uncounted: int = 0) -> None:
    """A layer that saw a window in its training sees no more in a student.

    Args:
        window: the `sliding_window` of the student.
        uncounted: 1 where that does not count the token itself, as a teacher's does.

    Raises:
        ValueError: a layer would see more.
    """
    own = [layer for layer, kind in enumerate(attention_types(teacher)) if kind == "sliding_attention"]
    if not own:
        return
    told = f"layers of the teacher, {own[0]} first, were trained to see {teacher.sliding_window} tokens"
    if wider := [layer for layer in own if block_types[layer] in ("full_attention", "mixed_attention")]:
        raise ValueError(f"layer {wider[0]} of the student would see all tokens, but {told}: leave keep_as out.")
    if window is not None and window + uncounted > teacher.sliding_window:
        most = teacher.sliding_window - uncounted
        raise ValueError(f"sliding_window={window} is too wide: {told}. Give at most {most}, or leave it out.")


def _sink_fields(teacher: Any, block_types: Sequence[str], fields: dict[str, Any]) -> dict[str, Any]:
    """A sink for windows that take the place of attention to all tokens; a teacher's own windows have none."""
    if fields.get("attention_sink") == "scalar":
        raise ValueError(
            'attention_sink="scalar" would change what the teacher computes within the window: give "constant", or '
            "None."
        )
    slides = any(kind in WINDOW_BLOCK_TYPES for kind in block_types) and not fields.get("bidirectional")
    return {"attention_sink": "constant"} if slides and "sliding_attention" not in attention_types(teacher) else {}


def _without_idle_limit(config: Any, fields: dict[str, Any]) -> Any:
    """The teacher's length limits no student whose layers attend to windows or keep states."""
    if "max_position_embeddings" not in fields and not config.limits_positions:
        config.max_position_embeddings = None
    return config


def _fields_of_groups(
    teacher: Any, keep: list[tuple[int, int]], keep_as: str | None, others_as: str | None
) -> dict[str, Any]:
    """Layers some of whose key/value groups see all tokens; windows elsewhere."""
    if keep_as not in (None, "full_attention") or others_as not in (None, "sliding_attention"):
        raise ValueError(
            f"keep_as={keep_as!r}, others_as={others_as!r}: key/value groups that are kept have full attention, and "
            'the others a window. Give "full_attention" and "sliding_attention", or neither.'
        )
    if "sliding_attention" in attention_types(teacher):
        raise ValueError("keep names key/value groups, but attention of the teacher has a window: give whole layers.")
    groups: list[list[int]] = [[] for _ in range(teacher.num_hidden_layers)]
    for layer, group in keep:
        groups[layer].append(group)
    whole = [layer for layer, kept in enumerate(groups) if len(kept) == teacher.num_key_value_heads]
    known = _longhorn_fields(teacher, whole, "full_attention", "sliding_attention")
    mixed = {layer: kept for layer, kept in enumerate(groups) if kept and layer not in whole}
    types = ["mixed_attention" if layer in mixed else kind for layer, kind in enumerate(known["block_types"])]
    by_layer = [mixed.get(layer, []) for layer in range(len(groups))] if mixed else None
    return known | {"block_types": types, "full_attention_groups": by_layer}


def _longhorn_fields(teacher: Any, keep: Sequence[int], keep_as: str | None, others_as: str) -> dict[str, Any]:
    if keep_as not in (None, "full_attention", "sliding_attention"):
        raise ValueError(f'keep_as={keep_as!r} must be "full_attention", "sliding_attention" or None.')
    if others_as not in OTHERS:
        raise ValueError(f"others_as={others_as!r} must be one of {', '.join(map(repr, OTHERS))}.")
    types = [(keep_as or kind) if index in keep else others_as for index, kind in enumerate(attention_types(teacher))]
    window = getattr(teacher, "sliding_window", None)
    if window is None and others_as != "linear_attention":
        window = WINDOW
    known = {
        "block_types": types,
        "mlp_intermediate_size": teacher.intermediate_size,
        "use_bias": True,  # a constant gate has no other place
        "residual_in_fp32": False,
        "state_size": 32,
    }
    if window is not None:
        known["sliding_window"] = window
    return known | (_beside_attention(teacher) if others_as == "hybrid_sliding" else {})


def _beside_attention(teacher: Any) -> dict[str, Any]:
    """What gives a mixer the heads of its teacher's attention: keys, queries, and values in pairs of channels."""
    size, heads = head_dim_of(teacher), teacher.num_attention_heads
    return {
        "num_heads": heads,
        "state_size": size,
        "expand": -(-2 * heads * size // teacher.hidden_size),
        "use_qk_proj": True,
        "use_rope_in_mixer": True,
    }


def _bst_fields(teacher: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """What makes the layers of a BST the teacher's: nothing but softmax over rotated keys, and a gated SiLU layer."""
    known: dict[str, Any] = {
        "intermediate_size": teacher.intermediate_size,
        "hidden_act": "silu",
        "gated_mlp": True,
        "qk_norm": False,
        "attend_self": True,
        "zero_kv_sink": False,
        "dropout": 0.0,
        "final_dropout": 0.0,
        "logit_scale": 1.0,
    }
    if "sliding_attention" in attention_types(teacher):
        if teacher.sliding_window < 2:
            raise ValueError(
                f"sliding_window={teacher.sliding_window} of the teacher: a window of a BST holds at least one token "
                "before the current one, so the teacher's must be 2 or more: give another teacher."
            )
        known["sliding_window"] = teacher.sliding_window - 1  # theirs counts the token itself
    if "block_types" not in fields:
        known["ssm_layers"] = evenly_spaced(teacher.num_hidden_layers, max(1, round(teacher.num_hidden_layers / 4)))
    return known
