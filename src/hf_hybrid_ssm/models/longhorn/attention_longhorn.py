"""The attention layers of hybrid Longhorn stacks, over all tokens or a window; the paper's models have neither."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from hf_hybrid_ssm.layers.attention_sink import AttentionSink, Rotation
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.cache import served_keys
from hf_hybrid_ssm.models.cache_names import CACHE, by_both_cache_names
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.packing import PackedRows, States
from hf_hybrid_ssm.models.rotary import rotated
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.pages import ServedKeys
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.local_attention import (
    AttentionState,
    Window,
    append_to_window,
    document_ranks,
    local_attention,
)

WINDOW_STATES = AttentionState._fields
"""The names of what window attention keeps in its layer of the cache."""
OF_WINDOW = "window_"
"""Before these names where the layer also keeps all keys and values of other groups, under the plain names."""
ALL_BEFORE = Window.of((None, 0))


class LonghornAttention(nn.Module):
    """Grouped-query attention with rotary positions, for hybrid stacks."""

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        bias, eps = config.attention_bias, config.layer_norm_epsilon
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None

    @by_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        sink_rotation: Rotation | None = None,
        query_scale: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if rows.token_mask is not None:  # the weight of padding is 0, and 0 times NaN is NaN
            hidden_states = torch.where(rows.token_mask.unsqueeze(-1), hidden_states, 0.0)
        queries, keys, values = (x.transpose(1, 2) for x in self.heads(hidden_states, position_embeddings))
        if query_scale is not None:
            queries = (queries * query_scale[:, None, :, None]).to(values.dtype)
        if cache is not None:
            if (served := served_keys(cache, self.layer_idx)) is not None:
                return self.o_proj(served.attend(queries, keys, values, scale=self.scaling)), None
            keys, values = cache.update(keys, values, self.layer_idx)
        output, weights = self._attend(queries, keys, values, attention_mask, **kwargs)
        return self.o_proj(output), weights

    def heads(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each (B, L, heads, head_dim)."""
        queries, keys, values = self._projected(hidden_states)
        return *rotated(queries, keys, position_embeddings, values.dtype), values

    def _projected(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`heads`, not yet rotated."""
        queries, keys, values = (
            layer(hidden_states).unflatten(-1, (-1, self.head_dim))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return queries, keys, values

    def _attend(self, *heads: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries, keys and values (B, heads, L, head_dim) and the mask → (B, L, heads · head_dim) and the weights, by
        the attention that the configuration names."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(self, *heads, dropout=dropout, scaling=self.scaling, **options)
        return output.flatten(2), weights


class LonghornSlidingAttention(RecurrentMixin, LonghornAttention):
    """Attention to the last `sliding_window` tokens, including the current one, and to a sink if `attention_sink` says
    so; padding does not count.

    `heads` are queries, keys and values, each (B, L, heads, head_dim), and for a sink the queries before rotation.
    """

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        assert config.sliding_window is not None  # `LonghornConfig` refuses such layers without it
        self.window = Window.of((config.sliding_window - 1, 0))
        kind, groups = config.attention_sink, config.num_key_value_heads - len(config.full_groups(layer_idx))
        sizes = {"heads": groups * self.num_key_value_groups, "groups": groups, "head_dim": self.head_dim}
        self.sink = None if kind is None else AttentionSink(kind, **sizes)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        sink_rotation: Rotation | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        heads = self.heads(hidden_states, position_embeddings)
        return self.forward_with_cache(*heads, rows=rows, cache=cache, sink_rotation=sink_rotation), None

    def heads(  # type: ignore[override]
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """What `forward_rows` takes."""
        queries, keys, values = self._projected(hidden_states)
        heads = (*rotated(queries, keys, position_embeddings, values.dtype), values)
        return heads if self.sink is None else (*heads, queries)

    def forward_rows(  # type: ignore[override]
        self,
        *heads: torch.Tensor,
        past: States,
        rows: Rows,
        sink_rotation: Rotation | None = None,
    ) -> tuple[torch.Tensor, States]:
        attended, states = self._attend_window(*heads, past=past, rows=rows, sink_rotation=sink_rotation)
        return self.o_proj(attended), states

    def _attend_window(
        self, *heads: torch.Tensor, past: States, rows: Rows, sink_rotation: Rotation | None
    ) -> tuple[torch.Tensor, States]:
        """`forward_rows` before the output projection, (B, L, heads · head_dim)."""
        queries, keys, values = (x.transpose(1, 2) for x in heads[:3])
        is_one_document = not past and rows.documents is None
        if is_one_document and self.sink is None and is_flash_attention_requested(self.config):
            # a row's only document from its start; padding comes after all tokens that look back
            output, _ = self._attend(queries, keys, values, None, sliding_window=self.config.sliding_window)
            return output, self._window_after(*heads, past=past, rows=rows) if rows.return_final_state else {}
        sink = {}
        if self.sink is not None:
            ranks = document_ranks(
                queries.shape[2], seen=past.get("seen"), seq_idx=rows.seq_idx, device=queries.device
            )
            sink = self.sink(heads[3], ranks, **self._of_sink(sink_rotation))
        output, state = local_attention(
            queries,
            keys,
            values,
            window=self.window,
            scale=self.scaling,
            **sink,
            dropout=self.attention_dropout if self.training else 0.0,
            rows=rows,
            initial_state=AttentionState(**past) if past else None,
        )
        return output.transpose(1, 2).flatten(2), {} if state is None else state._asdict()

    def _of_sink(self, rotation: Rotation | None) -> dict[str, Any]:
        return {
            "left": self.window.left,
            "scale": self.scaling,
            "is_rotary": True,
            "rotation": rotation,
        }

    def states_after(self, *heads: torch.Tensor, past: States, rows: Rows, **options: Any) -> States:
        """The last keys and values, without attending."""
        return self._window_after(*heads, past=past, rows=rows)

    def _window_after(self, *heads: torch.Tensor, past: States, rows: Rows) -> States:
        before = AttentionState(**past) if past else None
        keys, values = (x.transpose(1, 2) for x in heads[1:3])
        return append_to_window(before, keys, values, self.window.left, rows)._asdict()


class LonghornMixedAttention(LonghornSlidingAttention):
    """Attention some of whose key/value groups, `full_attention_groups`, see all tokens, and the others a window.

    What recall needs are single groups: so a layer keeps the keys and values of all tokens for these alone. Its layer
    of the cache holds both kinds. `heads` are queries, keys and values of the full groups, then those of the others as
    `LonghornSlidingAttention` has them; the projections are in the order of all groups.
    """

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.full_groups = config.full_groups(layer_idx)
        self.window_groups = [group for group in range(config.num_key_value_heads) if group not in self.full_groups]

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        sink_rotation: Rotation | None = None,
        query_scale: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        heads = self.heads(hidden_states, position_embeddings, query_scale)
        return self.forward_with_cache(*heads, rows=rows, cache=cache, sink_rotation=sink_rotation), None

    def heads(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        query_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """What `forward_rows` takes; `query_scale` (B or 1, L) is of full attention alone."""
        parts = super().heads(hidden_states, position_embeddings)
        queries, keys, values = (self._of_groups(part, self.full_groups) for part in parts[:3])
        if query_scale is not None:
            queries = (queries * query_scale[:, :, None, None]).to(values.dtype)
        return queries, keys, values, *(self._of_groups(part, self.window_groups) for part in parts)

    def _of_groups(self, heads: torch.Tensor, groups: list[int]) -> torch.Tensor:
        """(B, L, heads, head_dim) → those of some key/value groups, in their order."""
        by_group = heads.unflatten(2, (self.config.num_key_value_heads, -1)).unbind(2)
        return torch.cat([by_group[group] for group in groups], 2)

    def forward_rows(  # type: ignore[override]
        self,
        *heads: torch.Tensor,
        past: States,
        rows: Rows,
        sink_rotation: Rotation | None = None,
    ) -> tuple[torch.Tensor, States]:
        before, window = _full_and_window(past)
        full, state = self._attend_all(*heads[:3], past=before, rows=rows)
        windowed, of_window = self._attend_window(*heads[3:], past=window, rows=rows, sink_rotation=sink_rotation)
        by_group = dict(zip(self.full_groups, full.chunk(len(self.full_groups), 2)))
        by_group |= dict(zip(self.window_groups, windowed.chunk(len(self.window_groups), 2)))
        output = self.o_proj(torch.cat([by_group[group] for group in sorted(by_group)], 2))
        return output, _together(state, of_window)

    def _attend_all(self, *heads: torch.Tensor, past: States, rows: Rows) -> tuple[torch.Tensor, States]:
        """Queries, keys and values of the full groups → (B, L, heads · head_dim), and the states after them."""
        queries, keys, values = (x.transpose(1, 2) for x in heads)
        if isinstance(served := past.get("keys"), ServedKeys):
            return self._ask(served, queries, keys, values), {}
        output, state = local_attention(
            queries,
            keys,
            values,
            window=ALL_BEFORE,
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            rows=rows,
            initial_state=AttentionState(**past) if past else None,
        )
        return output.transpose(1, 2).flatten(2), {} if state is None else state._asdict()

    def _ask(self, served: ServedKeys, *heads: torch.Tensor) -> torch.Tensor:
        """`served.attend`, of as many groups in every layer, since a server's pages have one size: zeros fill up."""
        missing = self.config.most_full_groups - len(self.full_groups)
        counts = missing * self.num_key_value_groups, missing, missing
        wide = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, more)) for x, more in zip(heads, counts))
        return served.attend(*wide, scale=self.scaling)[..., : heads[0].shape[1] * self.head_dim]

    def states_after(self, *heads: torch.Tensor, past: States, rows: Rows, **options: Any) -> States:
        before, window = _full_and_window(past)
        keys, values = (x.transpose(1, 2) for x in heads[1:3])
        state = append_to_window(AttentionState(**before) if before else None, keys, values, rows.capacity, rows)
        return _together(state._asdict(), self._window_after(*heads[3:], past=window, rows=rows))


def _together(full: States, window: States) -> States:
    """The states of both kinds of groups, for one layer of the cache."""
    return full | {OF_WINDOW + name: state for name, state in window.items()}


def _full_and_window(states: States) -> tuple[States, States]:
    """The inverse of `_together`."""
    full = {name: state for name, state in states.items() if not name.startswith(OF_WINDOW)}
    return full, {name.removeprefix(OF_WINDOW): state for name, state in states.items() if name not in full}


def temperature(config: LonghornConfig, position_ids: torch.Tensor) -> torch.Tensor:
    """What full attention's queries at the positions (B or 1, L) are multiplied by, float32: 1 + a · log(1 + ⌊(p + 1)
    / f⌋) with `attn_scale` a and `floor_scale` f, as in Llama 4."""
    assert config.floor_scale is not None  # a configuration with an `attn_scale` has it
    passed = torch.floor((position_ids + 1).float() / config.floor_scale)
    return 1 + config.attn_scale * torch.log1p(passed)


def _has_begun(
    starts: torch.Tensor,
    past: int | torch.Tensor,
    row: torch.Tensor,
    head: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """Whether the key's column is one of the query's document."""
    return key >= starts[row, query - past]


def attention_masks(
    config: LonghornConfig, inputs_embeds: torch.Tensor, rows: PackedRows, cache: Cache | None
) -> dict[str, torch.Tensor | None]:
    """The masks of the attention layers, by layer type.

    Documents are found by `rows` only: given positions, transformers would look for them again.

    Raises:
        ValueError: transformers makes no masks for the implementation of attention.
    """
    if "full_attention" not in config.layer_types:
        return {}
    if config._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} has no mask function, without which its layers "
            "attend to padding and to other documents: give one of that name to AttentionMaskInterface.register."
        )
    starts, past, real = rows.starts, rows.past, rows.full_token_mask
    has_begun = None
    if starts is not None and config._attn_implementation == "flex_attention":
        # not elsewhere: with a function of positions transformers goes through vmap, which torch.export cannot save
        has_begun = partial(_has_begun, starts, past)
    mask = create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=real,
        **{CACHE: cache},
        # it looks at the padding's values
        allow_is_causal_skip=starts is None and not inputs_embeds.is_meta and (real is None or can_read_values(real)),
        and_mask_function=has_begun,
    )
    if starts is not None and isinstance(mask, torch.Tensor) and mask.dim() == 4:
        own = (torch.arange(mask.shape[-1], device=mask.device) >= starts.unsqueeze(-1)).unsqueeze(1)
        # ONNX Runtime fills no boolean tensors
        mask = mask & own if mask.dtype == torch.bool else mask.masked_fill(~own, torch.finfo(mask.dtype).min)
    return {"full_attention": mask}
