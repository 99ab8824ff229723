"""Official Longhorn training checkpoints → a folder that `from_pretrained` loads.

    hf-hybrid-ssm convert longhorn IN OUT [--eos-token-id N] [--bos-token-id N]

IN is a file of tensors: what the official `train.py` saves (a dict with the state dict under "model"), a bare state
dict, or the same as safetensors. Every tensor must be known and none may be missing; sizes are read off the shapes.
Only tensors and plain values are unpickled (`weights_only=True`). The official runs use GPT-2's vocabulary, whose one
special token is 50256; with a vocabulary of another size none is set unless given.
"""

import re
from pathlib import Path

import torch

from hf_hybrid_ssm.hub.official.state_dict import check_tokens, load_state_dict_strict, read_checkpoint
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornForCausalLM

GPT2_VOCABULARIES = (50257, 50304)  # as it is, and padded as the official train.py does

GLOBAL_KEYS = {
    "backbone.embedding.weight": "model.embed_tokens.weight",
    "backbone.norm_f.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
LAYER_KEYS = {
    "norm.weight": "norm.weight",
    "mixer.in_proj.weight": "mixer.in_proj.weight",
    "mixer.conv1d.weight": "mixer.conv1d.weight",
    "mixer.conv1d.bias": "mixer.conv1d.bias",
    "mixer.x_proj.weight": "mixer.x_proj.weight",
    "mixer.dt_head.weight": "mixer.dt_proj.weight",
    "mixer.dt_head.bias": "mixer.dt_bias",
    "mixer.D": "mixer.D",
    "mixer.out_proj.weight": "mixer.out_proj.weight",
}
LAYER = re.compile(r"backbone\.layers\.(\d+)\.(.+)")


def convert_state_dict(official: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename every tensor; no tensor changes its shape.

    Raises:
        ValueError: a key is not one of the official Longhorn's.
    """
    if any(key.endswith("A_log") for key in official):
        raise ValueError(
            "The checkpoint has A_log tensors: it is a Mamba checkpoint, whose weights mean other things."
        )
    converted, unknown = {}, []
    for key, tensor in official.items():
        layer = LAYER.fullmatch(key)
        if key in GLOBAL_KEYS:
            converted[GLOBAL_KEYS[key]] = tensor
        elif layer and layer[2] in LAYER_KEYS:
            converted[f"model.layers.{layer[1]}.{LAYER_KEYS[layer[2]]}"] = tensor
        else:
            unknown.append(key)
    if unknown:
        raise ValueError(f"Unknown tensors in the checkpoint: {', '.join(sorted(unknown))}.")
    return converted


def infer_config(converted: dict[str, torch.Tensor], **overrides) -> LonghornConfig:
    """The configuration that the shapes of the (converted) tensors say.

    Raises:
        ValueError: a layer, or a tensor that the sizes are read from, is missing or has no such shape; a special token
            lies outside the vocabulary.
    """
    first = "model.layers.0.mixer."
    needed = ("model.embed_tokens.weight", *(f"{first}{n}.weight" for n in ("in_proj", "conv1d", "x_proj", "dt_proj")))
    if missing := [key for key in needed if key not in converted]:
        raise ValueError(f"The checkpoint lacks {', '.join(missing)}.")
    for key in needed:
        rank = 3 if "conv1d" in key else 2
        if converted[key].dim() != rank or 0 in converted[key].shape:
            raise ValueError(
                f"{key} has shape {tuple(converted[key].shape)}, but {rank} dimensions, none of them 0, were expected."
            )
    layers = {int(key.split(".")[2]) for key in converted if key.startswith("model.layers.")}
    if max(layers) != len(layers) - 1:
        raise ValueError(f"The checkpoint lacks layers between 0 and {max(layers)}: it has {len(layers)}.")
    vocab_size, hidden_size = converted["model.embed_tokens.weight"].shape
    rank = converted[f"{first}dt_proj.weight"].shape[1]
    head = converted.get("lm_head.weight")
    if vocab_size not in GPT2_VOCABULARIES:
        overrides = {"bos_token_id": None, "eos_token_id": None} | overrides
    config = LonghornConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=len(layers),
        state_size=(converted[f"{first}x_proj.weight"].shape[0] - rank) // 2,
        expand=converted[f"{first}in_proj.weight"].shape[0] // (2 * hidden_size),
        conv_kernel=converted[f"{first}conv1d.weight"].shape[-1],
        time_step_rank=rank,
        use_conv_bias=f"{first}conv1d.bias" in converted,
        tie_word_embeddings=head is None or torch.equal(head, converted["model.embed_tokens.weight"]),
        **overrides,
    )
    check_tokens(config, overrides)
    return config


def convert(source: str | Path, **overrides) -> LonghornForCausalLM:
    """The model in an official checkpoint file.

    Args:
        source: the checkpoint file.
        overrides: fields of `LonghornConfig` that shapes cannot tell, such as `eos_token_id`.

    Raises:
        ValueError: tensors that are unknown, missing, or of a shape that does not fit the others.
    """
    converted = convert_state_dict(read_checkpoint(source)[0])
    config = infer_config(converted, **overrides)
    if config.tie_word_embeddings:
        converted["lm_head.weight"] = converted["model.embed_tokens.weight"]
    model = LonghornForCausalLM(config)
    load_state_dict_strict(model, converted)
    return model
