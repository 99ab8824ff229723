"""The one class that vLLM runs all families by: transformers' model, on states in vLLM's pages.

To vLLM, a model is a single layer with a single state of bytes, one page for each request. The page holds the states
of all layers (`paged_states.PageLayout`). Prefix caching, preemption and the count of free pages are vLLM's own.

A model with full attention is a hybrid to vLLM: its layers of full attention are vLLM's (`vllm_attention`), and the
page is in as many parts as there are of them, each a layer of states. vLLM gives both kinds blocks of one size.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hf_hybrid_ssm.hub.one_line import few
from hf_hybrid_ssm.serving.paged_states import PagedModel, Requests
from hf_hybrid_ssm.serving.state_layout import FullAttention
from hf_hybrid_ssm.serving.vllm_attention import VllmAttention
from hf_hybrid_ssm.serving.vllm_checks import model_class


def layer_of_states(part: int) -> str:
    """The name of the layer with that part of the pages; vLLM asks for a number."""
    return f"states.{part}"


@dataclass
class PagedMetadata(LinearAttentionMetadata):
    """What vLLM says of a forward, with what the host knows of it."""

    requests: Requests


class PagedMetadataBuilder(LinearAttentionMetadataBuilder):
    """Lengths are read where the host has them: a look at the device would stop its queue in every step."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        ends = common_attn_metadata.query_start_loc_cpu.tolist()
        total = common_attn_metadata.seq_lens_cpu_upper_bound  # exact, as there is no speculative decoding
        total = (common_attn_metadata.seq_lens if total is None else total).tolist()
        lengths = [end - start for start, end in pairwise(ends)]
        count = next((row for row, length in enumerate(lengths) if length == 0), len(lengths))  # then comes padding
        seen = [so_far - length for so_far, length in zip(total, lengths)]
        requests = Requests(lengths[:count], seen[:count], built.state_indices_tensor[:count].long())
        return PagedMetadata(**{field.name: getattr(built, field.name) for field in fields(built)}, requests=requests)


class PagedBackend(LinearAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "HF_HYBRID_SSM"

    @staticmethod
    def get_builder_cls() -> type[LinearAttentionMetadataBuilder]:
        return PagedMetadataBuilder


class PageOfStates(MambaBase):
    """A layer that has the pages, or one part of each."""

    def __init__(self, paged: PagedModel, part: int):
        self.paged, self.part = paged, part
        self.kv_cache = (torch.tensor([]),)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        self.paged.bind(self.kv_cache[0], self.part)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.paged.layout.num_bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[LinearAttentionBackend]:
        return PagedBackend


class PagedHybridForCausalLM(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """A language model of any family of this package in vLLM; `PagedHybridConfig` says which is a hybrid to it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        self.inner = model_class(config)._from_config(config, dtype=dtype).eval().requires_grad_(False)
        for name, parameter in self.inner.named_parameters():
            if name.rpartition(".")[2] in (self.inner._keep_in_fp32_modules_strict or ()):
                parameter.data = parameter.data.float()
        self.attention: VllmAttention | None = None
        self.paged = PagedModel(self.inner, vllm_config.scheduler_config.max_num_batched_tokens, self._serve)
        for part in range(self.paged.layout.num_parts):
            pages = PageOfStates(self.paged, part)
            vllm_config.compilation_config.static_forward_context[layer_of_states(part)] = pages

    def _serve(self, layers: list[FullAttention]) -> VllmAttention:
        self.attention = VllmAttention(layers, get_current_vllm_config())
        return self.attention

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Of a hybrid, which is built before vLLM asks."""
        return vllm_config.compilation_config.static_forward_context[layer_of_states(0)].get_state_shape()

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_temporal_copy_spec,)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(T,) token ids of all requests → (T, D)."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # memory is measured before there are pages
            return self.paged.forward_without_pages(input_ids)
        assert isinstance(metadata, dict)
        requests = metadata[layer_of_states(0)].requests
        count = sum(requests.lengths)
        hidden_states = self.paged.forward(input_ids[:count], positions[:count], requests)
        return nn.functional.pad(hidden_states, (0, 0, 0, len(input_ids) - count))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(N, D) → (N, V)."""
        return self.paged.logits(hidden_states)

    def _advice(self) -> str:
        if not get_model_conversion_mapping(self.inner, add_legacy=False):
            return ""
        return "; transformers stores these layers under other names: save it with save_original_format=False"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take every tensor of a checkpoint, and all that the model has.

        Raises:
            ValueError: names what the checkpoint lacks, has besides, or has in another shape.
        """
        own, loaded = self.inner.state_dict(), set()
        for name, tensor in weights:
            if name not in own:
                if any(re.search(p, name) for p in self.inner._keys_to_ignore_on_load_unexpected or ()):
                    continue
                raise ValueError(
                    f"the checkpoint holds {name}, which {type(self.inner).__name__} does not have{self._advice()}."
                )
            if tensor.shape != own[name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} in the checkpoint, and {type(self.inner).__name__} needs "
                    f"{tuple(own[name].shape)}."
                )
            own[name].copy_(tensor)
            loaded.add(name)
        if missing := sorted(own.keys() - loaded - set(self.inner.all_tied_weights_keys)):
            raise ValueError(f"the checkpoint lacks {few(missing)}, which {type(self.inner).__name__} needs.")
        self.inner.clear_kernel_caches()
        return {f"inner.{name}" for name in own}
