"""Official SPADE language models (fairseq) → a folder that `from_pretrained` loads.

    python -m hf_hybrid_ssm.models.spade.convert_official_checkpoint IN OUT [--local-radius 511]

IN is what fairseq's trainer saves, a dict with the state dict under "model", or a bare state dict, or safetensors.
Only tensors are unpickled (`weights_only=True`), which refuses a file that holds more, such as fairseq's settings:
save its tensors alone first. Sizes are read off the shapes; what shapes cannot tell is the preset's of Wikitext-103.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from hf_hybrid_ssm.layers.s4_official import convert_s4
from hf_hybrid_ssm.models.official_state_dict import load_exactly, read_state_dict
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig
from hf_hybrid_ssm.models.spade.modeling_spade import SpadeForCausalLM

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
WITHOUT_CONTENT = re.compile(r"decoder\.(version|embed_positions\._float_tensor)")


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
            converted[f"model.decoder.layers.{layer[1]}.{LAYER_KEYS[layer[2]]}"] = tensor
        elif layer and layer[2] == BIAS_KEY and layer[1] == "0":
            converted["model.decoder.relative_bias.weight"] = tensor
        elif layer and layer[2] == S4_SKIP:
            skips[layer[1]] = tensor
        elif layer and layer[2].startswith(S4_KERNEL):
            kernels.setdefault(layer[1], {})[layer[2].removeprefix(S4_KERNEL)] = tensor
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
        converted |= {f"model.decoder.layers.{layer_index}.mixing.ssm.{name}": part for name, part in ssm.items()}
    return converted


def infer_config(converted: dict[str, torch.Tensor], **overrides: Any) -> SpadeConfig:
    """The configuration that the shapes of the (converted) tensors say.

    Raises:
        ValueError: a tensor that the sizes are read from is missing.
    """
    bands = [key for key in converted if key.startswith("model.embed_tokens.table_")]
    first = "model.decoder.layers.0."
    needed = ["model.embed_tokens.table_0", "model.decoder.relative_bias.weight", f"{first}feed_forward.fc1.weight"]
    if missing := [key for key in needed if key not in converted]:
        raise ValueError(f"The checkpoint lacks {', '.join(missing)}.")
    tables = [converted[f"model.embed_tokens.table_{band}"] for band in range(len(bands))]
    ends = torch.tensor([table.shape[0] for table in tables]).cumsum(0).tolist()
    buckets, heads = converted["model.decoder.relative_bias.weight"].shape
    layers = {int(key.split(".")[3]) for key in converted if key.startswith("model.decoder.layers.")}
    with_ssm = sorted(int(key.split(".")[3]) for key in converted if key.endswith("ssm.A_imag"))
    sizes: dict[str, Any] = {
        "vocab_size": ends[-1],
        "adaptive_cutoffs": ends[:-1],
        "hidden_size": tables[0].shape[1],
        "intermediate_size": converted[f"{first}feed_forward.fc1.weight"].shape[0],
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "relative_attention_num_buckets": buckets,
        "global_layers": with_ssm,
    }
    if len(tables) > 1:
        sizes["adaptive_factor"] = tables[0].shape[1] // tables[1].shape[1]
    if with_ssm:
        eigenvalues = converted[f"model.decoder.layers.{with_ssm[0]}.mixing.ssm.A_imag"]
        sizes |= {"ssm_state_size": 2 * eigenvalues.shape[1], "ssm_num_dynamics": eigenvalues.shape[0]}
    return SpadeConfig(**{**SpadeConfig.presets["spade-lm-wt103"], **sizes, **overrides})


def convert(source: str | Path, **overrides: Any) -> SpadeForCausalLM:
    """The model in an official checkpoint file.

    Args:
        source: the checkpoint file.
        overrides: fields of `SpadeConfig` that shapes cannot tell, such as `local_radius`.

    Raises:
        ValueError: tensors that are unknown, missing, or of a shape that does not fit the others.
    """
    converted = convert_state_dict(read_state_dict(source))
    model = SpadeForCausalLM(infer_config(converted, **overrides))
    load_exactly(model, converted)
    return model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert an official SPADE language model.")
    parser.add_argument("source", metavar="IN", type=Path, help="checkpoint file (.pt, .bin or .safetensors)")
    parser.add_argument("target", metavar="OUT", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--local-radius", type=int, default=SpadeConfig.local_radius, help="r: window of r + 1 keys")
    options = parser.parse_args(arguments)
    if options.target.exists() and any(options.target.iterdir()):
        parser.error(f"{options.target} is not empty")
    model = convert(options.source, local_radius=options.local_radius)
    model.save_pretrained(options.target)
    print(f"{options.target}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
