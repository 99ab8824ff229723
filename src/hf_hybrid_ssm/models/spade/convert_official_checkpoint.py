"""Official SPADE language models (fairseq) → a folder that `from_pretrained` loads.

    hf-hybrid-ssm convert spade IN OUT [--eos-token-id 2] [--set sliding_window=512]

IN is what fairseq's trainer saves, a dict with the state dict under "model" and its settings under "cfg" (or "args"),
or a bare state dict, or safetensors. Only tensors, plain values and the namespace of the settings are unpickled
(`weights_only=True`). Sizes are read off the shapes; what shapes cannot tell (the window, dropout, the activation) is
read from the settings, and is that of Wikitext-103's preset where a file has none. The special tokens are those of
fairseq's dictionaries, whatever the text: beginning 0, padding 1, end 2 and, without a field in the configuration,
unknown 3.
"""

import re
from pathlib import Path
from typing import Any

import torch

from hf_hybrid_ssm.models.official_state_dict import check_tokens, load_state_dict_strict, read_checkpoint
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig
from hf_hybrid_ssm.models.spade.modeling_spade import SpadeForCausalLM
from hf_hybrid_ssm.models.spade.official_s4 import convert_s4

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
LAYER_KEYS = {
    **{f"self_attn.{name}.weight": f"mixing.self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")},
    **{f"self_attn_layer_norm.{kind}": f"mixing_norm.{kind}" for kind in ("weight", "bias")},
    **{f"final_layer_norm.{kind}": f"feed_forward_norm.{kind}" for kind in ("weight", "bias")},
    **{f"{name}.{kind}": f"feed_forward.{name}.{kind}" for name in ("fc1", "fc2") for kind in ("weight", "bias")},
    **{
        f"{name}.{kind}": f"mixing.{name}.{kind}"
        for name in ("norm_global", "norm_local", "aggregate")
        for kind in ("weight", "bias")
    },
}
BIAS_KEY = "self_attn.relative_attention_bias.weight"
S4_KERNEL, S4_SKIP = "s4_module.s4.kernel.kernel.", "s4_module.s4.D"
EMBEDDING = re.compile(r"decoder\.embed_tokens\.embeddings\.(\d+)\.([01])\.weight")
SOFTMAX = "decoder.adaptive_softmax."
TAIL = re.compile(r"decoder\.adaptive_softmax\.tail\.(\d+)\.([02])\.weight")
# fairseq's marks of versions, and buffers that only tell a device and a dtype
WITHOUT_CONTENT = re.compile(
    r"decoder\.((adaptive_softmax\.)?version|(embed_tokens|adaptive_softmax\.head)\._float_tensor)"
)
GLOBAL_KEYS = {
    "decoder.embed_tokens.weight": "model.embed_tokens.weight",
    "decoder.output_projection.weight": "lm_head.weight",
    **{f"decoder.layer_norm.{kind}": f"model.norm.{kind}" for kind in ("weight", "bias")},
}
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
    converted: dict[str, torch.Tensor] = {}
    kernels: dict[str, dict[str, torch.Tensor]] = {}
    skips: dict[str, torch.Tensor] = {}
    copies: dict[str, str] = {}
    unknown = []
    for key, tensor in official.items():
        layer, band, tail = LAYER.fullmatch(key), EMBEDDING.fullmatch(key), TAIL.fullmatch(key)
        if layer and layer[2] in LAYER_KEYS:
            converted[f"model.layers.{layer[1]}.{LAYER_KEYS[layer[2]]}"] = tensor
        elif layer and layer[2] == BIAS_KEY and layer[1] == "0":
            converted["model.relative_bias.weight"] = tensor
        elif layer and layer[2] == S4_SKIP:
            skips[layer[1]] = tensor
        elif layer and layer[2].startswith(S4_KERNEL):
            kernels.setdefault(layer[1], {})[layer[2].removeprefix(S4_KERNEL)] = tensor
        elif key in GLOBAL_KEYS:
            converted[GLOBAL_KEYS[key]] = tensor
        elif band:
            converted[f"model.embed_tokens.{('table', 'projection')[int(band[2])]}_{band[1]}"] = tensor
        elif key == f"{SOFTMAX}head.class_proj.weight":
            converted["lm_head.clusters"] = tensor
        elif key == f"{SOFTMAX}head.word_proj.weight":
            copies[key] = "model.embed_tokens.table_0"
        elif tail:
            copies[key] = f"model.embed_tokens.{'projection' if tail[2] == '0' else 'table'}_{int(tail[1]) + 1}"
        elif not WITHOUT_CONTENT.fullmatch(key):
            unknown.append(key)
    if unknown:
        raise ValueError(f"Unknown tensors in the checkpoint: {', '.join(sorted(unknown))}.")
    for key, name in copies.items():
        if name not in converted or not torch.equal(official[key], converted[name]):
            raise ValueError(f"{key} differs from the embedding it is tied to; SPADE ties both.")
    for layer_index in sorted(kernels.keys() | skips.keys()):
        if layer_index not in kernels or layer_index not in skips:
            raise ValueError(f"Layer {layer_index} has only a part of its S4: kernel and D are needed.")
        ssm = convert_s4(kernels[layer_index], skips[layer_index])
        converted |= {f"model.layers.{layer_index}.mixing.ssm.{name}": part for name, part in ssm.items()}
    return converted


def infer_config(
    converted: dict[str, torch.Tensor], settings: dict[str, Any] | None = None, **overrides: Any
) -> SpadeConfig:
    """The configuration that the shapes of the (converted) tensors say.

    Args:
        converted: tensors by our names.
        settings: fairseq's, for what shapes cannot tell.
        overrides: fields that are to be otherwise.

    Raises:
        ValueError: a tensor that the sizes are read from is missing; a special token lies outside the vocabulary.
    """
    first = "model.layers.0."
    needed = ["model.relative_bias.weight", f"{first}feed_forward.fc1.weight"]
    if missing := [key for key in needed if key not in converted]:
        raise ValueError(f"The checkpoint lacks {', '.join(missing)}.")
    buckets, heads = converted["model.relative_bias.weight"].shape
    layers = {int(key.split(".")[2]) for key in converted if key.startswith("model.layers.")}
    with_ssm = sorted(int(key.split(".")[2]) for key in converted if key.endswith("ssm.A_imag"))
    sizes: dict[str, Any] = {
        **_vocabulary(converted),
        "intermediate_size": converted[f"{first}feed_forward.fc1.weight"].shape[0],
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "relative_attention_num_buckets": buckets,
        "ssm_layers": with_ssm,
        "final_norm": "model.norm.weight" in converted,
    }
    if with_ssm:
        mixing = f"model.layers.{with_ssm[0]}.mixing."
        eigenvalues = converted[f"{mixing}ssm.A_imag"]
        sizes |= {"ssm_state_size": 2 * eigenvalues.shape[1], "ssm_num_dynamics": eigenvalues.shape[0]}
        summed = "add" if f"{mixing}norm_global.weight" in converted else "stack"
        sizes["ssm_merge"] = "concat" if f"{mixing}aggregate.weight" in converted else summed
    settings = settings or {}
    said = {ours: settings[name] for name, ours in SETTINGS.items() if settings.get(name) is not None}
    if settings.get("local_radius") is not None:
        said["sliding_window"] = settings["local_radius"] + 1  # fairseq counts the other tokens only
    if "dropout" in said:
        said["embedding_dropout"] = said["dropout"]  # fairseq has one rate for both
    if "no_scale_embedding" in settings:
        said["scale_embedding"] = not settings["no_scale_embedding"]
    config = SpadeConfig(**{**SpadeConfig.presets["spade-lm-wt103"], **said, **sizes, **overrides})
    check_tokens(config, overrides)
    return config


def _vocabulary(converted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sizes of the embedding: one table, or one for each band of an adaptive vocabulary."""
    table = converted.get("model.embed_tokens.weight")
    if table is not None:
        head = converted.get("lm_head.weight")
        tied = head is not None and torch.equal(head, table)
        sizes: dict[str, Any] = {"vocab_size": table.shape[0], "hidden_size": table.shape[1]}
        return sizes | {"adaptive_cutoffs": None, "tie_word_embeddings": tied}
    bands = sum(key.startswith("model.embed_tokens.table_") for key in converted)
    if missing := [key for band in range(max(bands, 1)) if (key := _table(band)) not in converted]:
        raise ValueError(f"The checkpoint lacks {', '.join(missing)}.")
    tables = [converted[_table(band)] for band in range(bands)]
    ends = torch.tensor([table.shape[0] for table in tables]).cumsum(0).tolist()
    sizes = {"vocab_size": ends[-1], "hidden_size": tables[0].shape[1], "adaptive_cutoffs": ends[:-1]}
    return sizes | ({"adaptive_factor": tables[0].shape[1] // tables[1].shape[1]} if bands > 1 else {})


def _table(band: int) -> str:
    return f"model.embed_tokens.table_{band}"


def convert(source: str | Path, **overrides: Any) -> SpadeForCausalLM:
    """The model in an official checkpoint file.

    Args:
        source: the checkpoint file.
        overrides: fields of `SpadeConfig` that are to be other than the file says, such as `sliding_window`.

    Raises:
        ValueError: tensors that are unknown, missing, or of a shape that does not fit the others.
    """
    official, settings = read_checkpoint(source)
    converted = convert_state_dict(official)
    model = SpadeForCausalLM(infer_config(converted, settings, **overrides))
    load_state_dict_strict(model, converted)
    return model
