"""Official SPADE checkpoints → a folder that `from_pretrained` loads: language models (fairseq) by the rules below,
and the encoder-decoder of namisan/mt-dnn by those of `spade_seq2seq`.

    hf-hybrid-ssm convert spade IN OUT [--eos-token-id 2] [--set sliding_window=512]

IN is what fairseq's trainer saves, a dict with the state dict under "model" and its settings under "cfg" (or "args"),
or a bare state dict, or safetensors. Only tensors, plain values and the namespace of the settings are unpickled
(`weights_only=True`). Sizes are inferred from shapes; other fields (the window, dropout, the activation) are
read from the settings, and is that of Wikitext-103's preset where a file has none. The special tokens are those of
fairseq's dictionaries, whatever the text: beginning 0, padding 1, end 2 and, without a field in the configuration,
unknown 3.
"""

import re
from pathlib import Path
from typing import Any

import torch

from hf_hybrid_ssm.hub.official import spade_seq2seq
from hf_hybrid_ssm.hub.official.s4 import known_settings, renamed, rules_of, sizes_of_systems
from hf_hybrid_ssm.hub.official.state_dict import (
    Rule,
    check_tokens,
    load_state_dict_strict,
    our_name,
    read_checkpoint,
)
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig
from hf_hybrid_ssm.models.spade.modeling_spade import SpadeForCausalLM
from hf_hybrid_ssm.models.spade.modeling_spade_seq2seq import SpadeForConditionalGeneration

PARAMETERS = ("weight", "bias")
LAYER_KEYS = {
    **{f"self_attn.{name}.weight": f"mixing.self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")},
    **{f"self_attn_layer_norm.{part}": f"mixing_norm.{part}" for part in PARAMETERS},
    **{f"final_layer_norm.{part}": f"feed_forward_norm.{part}" for part in PARAMETERS},
    **{f"{name}.{part}": f"feed_forward.{name}.{part}" for name in ("fc1", "fc2") for part in PARAMETERS},
    **{f"{n}.{part}": f"mixing.{n}.{part}" for n in ("norm_global", "norm_local", "aggregate") for part in PARAMETERS},
}
"""Names in a layer: official → ours."""
EMBEDDINGS, SOFTMAX = r"decoder\.embed_tokens\.embeddings\.(\d+)", r"decoder\.adaptive_softmax"
RENAMED = rules_of(
    {
        r"decoder\.embed_tokens\.weight": "model.embed_tokens.weight",
        r"decoder\.output_projection\.weight": "lm_head.weight",
        r"decoder\.layer_norm\.(weight|bias)": r"model.norm.\1",
        r"decoder\.layers\.0\.self_attn\.relative_attention_bias\.weight": "model.relative_bias.weight",
        rf"{EMBEDDINGS}\.0\.weight": r"model.embed_tokens.table_\1",
        rf"{EMBEDDINGS}\.1\.weight": r"model.embed_tokens.projection_\1",
        rf"{SOFTMAX}\.head\.class_proj\.weight": "lm_head.clusters",
    }
    | {rf"decoder\.layers\.(\d+)\.{re.escape(key)}": rf"model.layers.\1.{ours}" for key, ours in LAYER_KEYS.items()}
)
TIED: list[Rule] = [
    (re.compile(rf"{SOFTMAX}\.head\.word_proj\.weight"), "model.embed_tokens.table_0"),
    (re.compile(rf"{SOFTMAX}\.tail\.(\d+)\.0\.weight"), lambda tail: _of_band("projection", int(tail[1]) + 1)),
    (re.compile(rf"{SOFTMAX}\.tail\.(\d+)\.2\.weight"), lambda tail: _of_band("table", int(tail[1]) + 1)),
]
"""Copies of tensors that have our name."""
S4 = r"decoder\.layers\.(\d+)\.s4_module\.s4", r"model.layers.\1.mixing.ssm"
# versions, and buffers without values of their own
WITHOUT_CONTENT = re.compile(
    r"decoder\.((adaptive_softmax\.)?version|(embed_tokens|adaptive_softmax\.head)\._float_tensor)"
)
SETTINGS = {
    "relative_attention_max_distance": "relative_attention_max_distance",
    "activation_fn": "hidden_act",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "adaptive_softmax_dropout": "adaptive_dropout",
    "s4_dt_min": "ssm_dt_min",
    "s4_dt_max": "ssm_dt_max",
    "s4_weight": "ssm_merge_weight",
}


def convert_state_dict(official: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by our names.

    Raises:
        ValueError: a key is not one of the official language model's, or a tied copy differs from its original.
    """
    converted, others = renamed(official, RENAMED, *S4)
    copies = {key: name for key in others if (name := our_name(key, TIED))}
    if unknown := [key for key in others if key not in copies and not WITHOUT_CONTENT.fullmatch(key)]:
        raise ValueError(f"Unknown tensors in the checkpoint: {', '.join(sorted(unknown))}.")
    for key, name in copies.items():
        if name not in converted or not torch.equal(official[key], converted[name]):
            raise ValueError(f"{key} differs from the embedding it is tied to; SPADE ties both.")
    return converted


def infer_config(
    converted: dict[str, torch.Tensor], settings: dict[str, Any] | None = None, **overrides: Any
) -> SpadeConfig:
    """The configuration, inferred from the shapes of the (converted) tensors.

    Args:
        converted: tensors by our names.
        settings: fairseq's, for other fields.
        overrides: fields that are to be otherwise.

    Raises:
        ValueError: a tensor that the sizes are read from is missing; a special token lies outside the vocabulary.
    """
    first = "model.layers.0.feed_forward.fc1.weight"
    if missing := [key for key in ("model.relative_bias.weight", first) if key not in converted]:
        raise ValueError(f"The checkpoint lacks {', '.join(missing)}.")
    buckets, heads = converted["model.relative_bias.weight"].shape
    sizes: dict[str, Any] = {
        **_vocabulary(converted),
        **_systems(converted),
        "intermediate_size": converted[first].shape[0],
        "num_hidden_layers": len({key.split(".")[2] for key in converted if key.startswith("model.layers.")}),
        "num_attention_heads": heads,
        "relative_attention_num_buckets": buckets,
        "final_norm": "model.norm.weight" in converted,
    }
    preset = SpadeConfig.presets["spade-lm-wt103"]
    config = SpadeConfig(**{**preset, **_from_settings(settings or {}), **sizes, **overrides})
    check_tokens(config, overrides)
    return config


def _systems(converted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Which layers have state-space models, their sizes, and how their outputs are merged with attention."""
    sizes = sizes_of_systems(converted, "model.layers.")
    if not sizes["ssm_layers"]:
        return sizes
    mixing = f"model.layers.{sizes['ssm_layers'][0]}.mixing."
    summed = "add" if f"{mixing}norm_global.weight" in converted else "stack"
    return sizes | {"ssm_merge": "concat" if f"{mixing}aggregate.weight" in converted else summed}


def _from_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Fields of the configuration from fairseq's settings."""
    fields = known_settings(settings, SETTINGS)
    if "dropout" in fields:
        fields["embedding_dropout"] = fields["dropout"]  # fairseq has one rate for both
    if "no_scale_embedding" in settings:
        fields["scale_embedding"] = not settings["no_scale_embedding"]
    return fields


def _vocabulary(converted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sizes of the embedding: one table, or one for each band of an adaptive vocabulary."""
    table = converted.get("model.embed_tokens.weight")
    if table is not None:
        head = converted.get("lm_head.weight")
        tied = head is not None and torch.equal(head, table)
        sizes: dict[str, Any] = {"vocab_size": table.shape[0], "hidden_size": table.shape[1]}
        return sizes | {"adaptive_cutoffs": None, "tie_word_embeddings": tied}
    bands = sum(key.startswith("model.embed_tokens.table_") for key in converted)
    if missing := [key for band in range(max(bands, 1)) if (key := _of_band("table", band)) not in converted]:
        raise ValueError(f"The checkpoint lacks {', '.join(missing)}.")
    tables = [converted[_of_band("table", band)] for band in range(bands)]
    ends = torch.tensor([table.shape[0] for table in tables]).cumsum(0).tolist()
    sizes = {"vocab_size": ends[-1], "hidden_size": tables[0].shape[1], "adaptive_cutoffs": ends[:-1]}
    return sizes | ({"adaptive_factor": tables[0].shape[1] // tables[1].shape[1]} if bands > 1 else {})


def _of_band(part: str, band: int) -> str:
    return f"model.embed_tokens.{part}_{band}"


def convert(source: str | Path, **overrides: Any) -> SpadeForCausalLM | SpadeForConditionalGeneration:
    """The model in an official checkpoint file.

    Args:
        source: the checkpoint file.
        overrides: fields of the configuration that replace those of the file, such as `sliding_window`.

    Raises:
        ValueError: tensors that are unknown, missing, or of a shape that does not fit the others.
    """
    official, settings = read_checkpoint(source)
    if spade_seq2seq.is_encoder_decoder(official):
        return spade_seq2seq.convert(official, Path(source).with_name("config.json"), **overrides)
    converted = convert_state_dict(official)
    model = SpadeForCausalLM(infer_config(converted, settings, **overrides))
    load_state_dict_strict(model, converted)
    return model
