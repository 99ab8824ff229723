"""The tensors of a GGUF file as the weights of a model of transformers: unpacked, renamed, and none left over."""

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import torch

from hf_hybrid_ssm.hub.gguf_config import FREQUENCIES
from hf_hybrid_ssm.hub.gguf_header import GgufHeader
from hf_hybrid_ssm.hub.one_line import few

HEAD = "lm_head.weight"


def weights_of(
    header: GgufHeader, config: Any, shapes: Mapping[str, torch.Size], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The weights by their names in transformers.

    Args:
        config: of the model, from `config_fields`.
        shapes: of its tensors, by name.
        dtype: what the numbers, unpacked to float32, are rounded to.

    Raises:
        ValueError: the file lacks a tensor, holds one that the model does not have, or one of another shape, of
            blocks that are not unpacked, or with NaN. Names it.
    """
    where, data = str(header.path), np.memmap(header.path, mode="r", dtype=np.uint8)
    places = dict(_places(header, config, shapes))
    absent = {name for name, place in places.items() if place not in header.tensors}
    zero = {name for name in absent if _is_no_bias_of(header, config, places[name])}
    if missing := sorted(str(places[name]) for name in absent - zero):
        raise ValueError(f"{where!r} lacks {few(missing)}: it is not a whole model.")
    if foreign := sorted(header.tensors.keys() - set(places.values()) - {FREQUENCIES}):
        raise ValueError(
            f"{where!r} holds {few(foreign)}, for which a {config.model_type} of transformers has no place: give the "
            "folder of the model instead."
        )
    weights = {name: torch.zeros(shapes[name], dtype=dtype) for name in zero}
    for name in places.keys() - zero:
        place = places[name]
        shape = header.tensors[place].shape
        if shape != tuple(shapes[name]):
            raise ValueError(f"{where!r} holds {place} as {shape}, and {tuple(shapes[name])} was expected.")
        value = torch.from_numpy(_unpacked(header, data, place))
        if not value.isfinite().all():
            raise ValueError(f"{where!r}: {place} holds NaN or infinite numbers.")
        weights[name] = _as_in_transformers(value, place, header.architecture, config).to(dtype).contiguous()
    return weights


def _places(header: GgufHeader, config: Any, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, str]]:
    """Name of a weight → that of its tensor in the file."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name in shapes:
        if name == HEAD and config.tie_word_embeddings:
            continue
        stem, _, part = name.rpartition(".")
        yield name, f"{names.get_name(stem)}.{part}"


def _is_no_bias_of(header: GgufHeader, config: Any, place: str) -> bool:
    """A bias that no layer of the file has, where others have one: it is zero."""
    part = place.split(".", 2)[-1]
    is_optional = place.endswith(".bias") and bool(getattr(config, "attention_bias", False))
    return is_optional and not any(name.endswith(f".{part}") for name in header.tensors)


def _unpacked(header: GgufHeader, data: np.ndarray, place: str) -> np.ndarray:
    tensor, size = header.tensors[place], header.bytes_of(place)
    kind = gguf.GGMLQuantizationType(tensor.kind)
    rows = data[tensor.offset : tensor.offset + size].reshape(*tensor.shape[:-1], -1)
    try:
        return gguf.quants.dequantize(rows, kind).astype(np.float32).reshape(tensor.shape)
    except NotImplementedError as error:
        raise ValueError(
            f"{str(header.path)!r}: {place} is of the type {kind.name}, which is not unpacked."
        ) from error


def _as_in_transformers(value: torch.Tensor, place: str, architecture: str, config: Any) -> torch.Tensor:
    """What llama.cpp's converter changed, changed back."""
    if architecture == "gemma3" and place.endswith("norm.weight"):
        return value - 1  # there the norms multiply by it, here by 1 + it
    if architecture == "llama":  # neighbours are rotated there, halves of a head here
        for part, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            if place.split(".")[-2] == part:
                return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(value.shape)
    return value
