"""Full attention by vLLM's own layers, with their cache, their kernels, and the metadata of the requests at hand."""

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    subclass_attention_backend,
)
from vllm.v1.attention.selector import get_attn_backend

from hf_hybrid_ssm.serving.paged_states import Requests
from hf_hybrid_ssm.serving.state_layout import FullAttention

CONTEXTS = "hf_hybrid_ssm"  # where a forward's context keeps those of some of its requests


class VllmAttention(nn.ModuleDict):
    """An `AttentionServer`: one of vLLM's attention layers for each layer of a model that attends to all tokens.

    A forward runs the model on one rectangle of requests after the other, and vLLM describes a forward as a whole. So
    each rectangle gets a description of its own requests, once for all layers.

    Args:
        layers: what the model's layers ask for.
        vllm_config: of the engine.

    Raises:
        ValueError: vLLM has no kernel for heads of that size here.
    """

    def __init__(self, layers: Sequence[FullAttention], vllm_config: VllmConfig):
        cache_config = copy.copy(vllm_config.cache_config)
        cache_config.sliding_window = None  # the configuration's own, which is of other layers
        super().__init__({str(layer.layer): _attention(layer, vllm_config, cache_config) for layer in layers})

    def forward(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, requests: Requests
    ) -> torch.Tensor:
        """As `AttentionServer`; while memory is measured there are no keys, and the answer is zero."""
        context = get_forward_context()
        if context.attn_metadata is None:
            return torch.zeros_like(queries).flatten(1)
        with override_forward_context(self._context(context, requests.rows)):
            return self[str(layer)](queries, keys, values)

    def _context(self, context: ForwardContext, rows: tuple[int, ...] | None) -> ForwardContext:
        """Of the requests `rows` alone."""
        assert isinstance(context.attn_metadata, dict) and isinstance(context.slot_mapping, dict)
        names = [_name(layer) for layer in self]
        whole: Any = context.attn_metadata[names[0]]  # one group of layers has one
        if rows is None or rows == tuple(range(whole.of_all.num_reqs)):
            return context
        known = context.additional_kwargs.setdefault(CONTEXTS, {})
        if rows not in known:
            common = _of_rows(whole.of_all, rows)
            metadata = whole.builder.build(0, common)
            known[rows] = replace(
                context,
                attn_metadata=dict.fromkeys(names, metadata),
                slot_mapping=dict.fromkeys(names, common.slot_mapping),
            )
        return known[rows]


def _name(layer: int | str) -> str:
    return f"attention.{layer}"


def _attention(layer: FullAttention, vllm_config: VllmConfig, cache_config: Any) -> Attention:
    head_dim, dtype = layer.head_dim, vllm_config.model_config.dtype
    backend = get_attn_backend(head_dim, dtype, cache_config.cache_dtype, num_heads=layer.num_heads)
    sizes = backend.get_supported_head_sizes()
    if sizes and head_dim not in sizes:
        raise ValueError(
            f"layer {layer.layer} has full attention with heads of {head_dim} channels, and vLLM's attention "
            f"({backend.get_name()}) has {', '.join(map(str, sizes))}."
        )
    return Attention(
        layer.num_heads,
        head_dim,
        layer.scale,
        num_kv_heads=layer.num_key_value_heads,
        cache_config=cache_config,
        prefix=_name(layer.layer),
        attn_backend=_of_some_requests(backend),
    )


def _of_some_requests(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend, whose metadata of a forward also tells what they were made of."""
    usual: Any = backend.get_builder_cls()
    assert issubclass(usual, AttentionMetadataBuilder)

    class Builder(usual):
        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
            return AttentionCGSupport.NEVER

        def build(
            self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.of_all, metadata.builder = common_attn_metadata, self
            return metadata

    return subclass_attention_backend("HfHybridSsm", backend, Builder)


def _of_rows(common: CommonAttentionMetadata, rows: tuple[int, ...]) -> CommonAttentionMetadata:
    """What describes some requests as if there were no others in the forward; tokens come in the order of `rows`."""
    places = [*pairwise(common.query_start_loc_cpu.tolist())]
    lengths = [places[row][1] - places[row][0] for row in rows]
    device = common.query_start_loc.device
    tokens = torch.cat([torch.arange(*places[row]) for row in rows]).to(device)
    index = torch.tensor(rows)
    there = index.to(device)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=common.query_start_loc_cpu.dtype)
    own = {
        "query_start_loc": ends.to(device),
        "query_start_loc_cpu": ends,
        "seq_lens": common.seq_lens[there],
        "num_reqs": len(rows),
        "num_actual_tokens": sum(lengths),
        "max_query_len": max(lengths),
        "block_table_tensor": common.block_table_tensor[there],
        "slot_mapping": common.slot_mapping[tokens],
        "positions": None if common.positions is None else common.positions[tokens],
        "is_prefilling": None if common.is_prefilling is None else common.is_prefilling[index],
    }
    upper = common.seq_lens_cpu_upper_bound
    own["seq_lens_cpu_upper_bound"] = None if upper is None else upper[index]
    # what vLLM keeps of the whole forward, computed once
    caches = {field.name for field in fields(common) if field.name.startswith("_")}
    return common.replace(**own, **dict.fromkeys(caches))
