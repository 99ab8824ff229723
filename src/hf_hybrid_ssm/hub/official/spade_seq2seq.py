"""The official SPADE encoder-decoder (`msrlongt5` of namisan/mt-dnn: SPADE base++) as `SpadeForConditionalGeneration`.

    hf-hybrid-ssm convert spade FOLDER/pytorch_model.bin OUT [--set sliding_window=129]

The official class is one of transformers, whose `save_pretrained` writes config.json beside the tensors: what shapes
cannot tell is read from there, and is that of the official configuration's defaults where there is none. No tensor
changes its shape, except that the decoder's positions lose the rows up to the padding's, which no token reads.
"""

import json
from pathlib import Path
from typing import Any

import torch

from hf_hybrid_ssm.hub.official.s4 import known_settings, renamed, rules_of, sizes_of_systems
from hf_hybrid_ssm.hub.official.state_dict import check_tokens, load_state_dict_strict
from hf_hybrid_ssm.models.spade.configuration_spade_seq2seq import SpadeSeq2SeqConfig
from hf_hybrid_ssm.models.spade.modeling_spade_seq2seq import SpadeForConditionalGeneration

EMBEDDING, POSITIONS, HEAD = "shared.weight", "decoder.pos_embed.weight", "lm_head.weight"
PADDING = 1  # the official positions count from the row after it, whatever pad_token_id says

_LAYER, _NORM = r"(encoder|decoder)\.block\.(\d+)\.layer\.", r"(weight|bias)"
_ENCODER, _DECODER = r"encoder\.block\.(\d+)\.layer\.", r"decoder\.block\.(\d+)\.layer\."
_FEED_FORWARD = {
    r"DenseReluDense\.wi": "feed_forward.fc1",
    r"DenseReluDense\.wo": "feed_forward.fc2",
    "layer_norm": "feed_forward_norm",
}
RENAMED = rules_of(
    {
        r"shared\.weight": "model.embed_tokens.weight",
        r"lm_head\.weight": HEAD,
        rf"(encoder|decoder)\.first_layer_norm\.{_NORM}": r"model.\1.embedding_norm.\2",
        rf"{_LAYER}0\.SelfAttention\.([qkvo])\.{_NORM}": r"model.\1.layers.\2.mixing.self_attn.\3_proj.\4",
        rf"{_ENCODER}0\.SelfAttention\.relative_attention_bias\.weight": (
            r"model.encoder.layers.\1.mixing.self_attn.relative_bias.weight"
        ),
        rf"{_ENCODER}0\.(norm_global|norm_local|aggregate)\.{_NORM}": r"model.encoder.layers.\1.mixing.\2.\3",
        rf"{_LAYER}0\.layer_norm\.{_NORM}": r"model.\1.layers.\2.mixing_norm.\3",
        rf"{_DECODER}1\.EncDecAttention\.([qkvo])\.{_NORM}": r"model.decoder.layers.\1.cross_attn.\2_proj.\3",
        rf"{_DECODER}1\.layer_norm\.{_NORM}": r"model.decoder.layers.\1.cross_attn_norm.\2",
    }
    | {rf"{_ENCODER}1\.{key}\.{_NORM}": rf"model.encoder.layers.\1.{ours}.\2" for key, ours in _FEED_FORWARD.items()}
    | {rf"{_DECODER}2\.{key}\.{_NORM}": rf"model.decoder.layers.\1.{ours}.\2" for key, ours in _FEED_FORWARD.items()}
)
S4 = rf"{_ENCODER}0\.s4\.s4", r"model.encoder.layers.\1.mixing.ssm"
TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Copies of the one embedding."""
SETTINGS = {
    "relative_attention_max_distance": "relative_attention_max_distance",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "feed_forward_proj": "hidden_act",
    "s4_dt_min": "ssm_dt_min",
    "s4_dt_max": "ssm_dt_max",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "decoder_start_token_id": "decoder_start_token_id",
}
DROPOUTS = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "embedding_dropout",
)  # the official code has one rate
REFUSED = {
    "decoder_roberta_lm_head": "RoBERTa's head, which the official code names and does not define",
    "s4_use_residual_dropout": "a residual around S4, which no option of this package has",
}


def is_encoder_decoder(official: dict[str, torch.Tensor]) -> bool:
    """Whether the tensors are those of the encoder-decoder, not of a language model."""
    return EMBEDDING in official


def convert_state_dict(official: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by our names.

    Raises:
        ValueError: a key is not one of the official encoder-decoder's, or a copy of the embedding differs from it.
    """
    converted, others = renamed(official, RENAMED, *S4)
    if unknown := sorted(set(others) - {POSITIONS, *TIED}):
        raise ValueError(
            f"Unknown tensors in the checkpoint: {', '.join(unknown)}. Converted are plain feed-forward layers (wi "
            "and wo) and a head that is one map."
        )
    if POSITIONS in official:
        converted["model.decoder.positions.weight"] = official[POSITIONS][PADDING + 1 :].clone()
    for key in TIED:
        if key in official and not torch.equal(official[key], official[EMBEDDING]):
            raise ValueError(f"{key} differs from {EMBEDDING}; SPADE's encoder and decoder share one embedding.")
    return converted


def infer_config(
    converted: dict[str, torch.Tensor], settings: dict[str, Any] | None = None, **overrides: Any
) -> SpadeSeq2SeqConfig:
    """The configuration, inferred from the shapes of the (converted) tensors.

    Args:
        converted: tensors by our names.
        settings: the official config.json, for other fields.
        overrides: fields that are to be otherwise.

    Raises:
        ValueError: a tensor that the sizes are read from is missing; a setting asks for what this package lacks; a
            special token lies outside the vocabulary.
    """
    first = "model.encoder.layers.0."
    table, fc1 = f"{first}mixing.self_attn.relative_bias.weight", f"{first}feed_forward.fc1.weight"
    if missing := [name for name in (table, fc1, "model.decoder.positions.weight", HEAD) if name not in converted]:
        raise ValueError(f"The checkpoint lacks {', '.join(missing)}.")
    buckets, heads = converted[table].shape
    embedding = converted["model.embed_tokens.weight"]
    sizes: dict[str, Any] = {
        **sizes_of_systems(converted, "model.encoder.layers."),
        "vocab_size": embedding.shape[0],
        "hidden_size": embedding.shape[1],
        "intermediate_size": converted[fc1].shape[0],
        "num_hidden_layers": _number_of_layers("encoder", converted),
        "num_decoder_layers": _number_of_layers("decoder", converted),
        "num_attention_heads": heads,
        "relative_attention_num_buckets": buckets,
        "max_target_positions": converted["model.decoder.positions.weight"].shape[0],
        "decoder_attention_bias": "model.decoder.layers.0.mixing.self_attn.q_proj.bias" in converted,
        "tie_word_embeddings": torch.equal(converted[HEAD], embedding),
        "embedding_norm": True,
        "final_norm": False,
    }
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = SpadeSeq2SeqConfig(**{**tokens, **_from_settings(settings or {}), **sizes, **overrides})
    check_tokens(config, overrides)
    return config


def _number_of_layers(stack: str, converted: dict[str, torch.Tensor]) -> int:
    prefix = f"model.{stack}.layers."
    return len({name.removeprefix(prefix).partition(".")[0] for name in converted if name.startswith(prefix)})


def _from_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Fields of the configuration from the official config.json."""
    if named := [f"{name} ({what})" for name, what in REFUSED.items() if settings.get(name)]:
        raise ValueError(f"The checkpoint's config.json asks for {' and '.join(named)}.")
    fields = known_settings(settings, SETTINGS)
    if settings.get("dropout_rate") is not None:
        fields |= dict.fromkeys(DROPOUTS, settings["dropout_rate"])
    if settings.get("normalize_before"):
        fields["norm_position"] = "pre"
    return fields


def _read_settings(path: Path) -> dict[str, Any]:
    """The official config.json; nothing where there is none.

    Raises:
        ValueError: it is no JSON, or another model's.
    """
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}).") from error
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if kind != "msrlongt5":
        raise ValueError(
            f"{path} has model_type={kind!r}; 'msrlongt5' was expected, or no config.json beside the file."
        )
    return settings


def convert(official: dict[str, torch.Tensor], config_path: Path, **overrides: Any) -> SpadeForConditionalGeneration:
    """The model of an official checkpoint.

    Args:
        official: its tensors.
        config_path: the config.json beside them, if there is one.
        overrides: fields of `SpadeSeq2SeqConfig` that replace those of both.

    Raises:
        ValueError: tensors that are unknown, missing, or of a shape that does not fit the others; settings that this
            package has no option for.
    """
    settings = _read_settings(config_path)
    converted = convert_state_dict(official)
    if settings.get("tie_word_embeddings", True):  # by default; formats that keep a shared tensor once lack the head
        converted.setdefault(HEAD, converted["model.embed_tokens.weight"])
    model = SpadeForConditionalGeneration(infer_config(converted, settings, **overrides))
    load_state_dict_strict(model, converted)
    return model
