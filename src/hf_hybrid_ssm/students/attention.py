"""The attention function of students, which transformers' attention layers call with queries, keys and values.

Attention to all tokens stays what the teacher's is, on transformers' own cache layers and masks. Where a window takes
its place, keys and values are states of this package's cache layers, and rows are read without their padding. So a
layer may also see all tokens in some of its key/value groups and a window in the others.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.pages import ServedKeys
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.local_attention import AttentionState, Window, append_to_window, document_ranks, local_attention
from hf_hybrid_ssm.students.configuration import PREFIX, LayerPlan, Student
from hf_hybrid_ssm.students.forward import Forward, Ranks
from hf_hybrid_ssm.students.sinks import ConstantSink, first_tokens, last_of, products

OF_WINDOW = "window_"
"""Prefix of a window's states in layers that also keep a full KV cache of other groups."""
ALL_BEFORE = Window.of((None, 0))


class WindowedAttention(RecurrentMixin):
    """Attention of one layer to a window, or to all tokens in some key/value groups and a window in the others.

    The inputs of its rows are queries (B, L, heads, e), keys and values (B, L, groups, e), of the groups that see all
    tokens and then of the others; and for a constant sink q·k (B, L, heads).

    Args:
        plan, groups: of the layer; `groups` of the teacher.
        student: the layer's.
        place: of `Forward.angles`; None where a sink is not turned.
    """

    def __init__(self, layer_idx: int, plan: LayerPlan, groups: int, student: Student, place: Any):
        assert plan.window is not None  # `HybridStudentConfig` refuses windows without a size
        self.layer_idx, self.groups, self.place = layer_idx, groups, place
        self.window_dropout, self.most_groups = student.window_dropout, student.most_full_groups(groups)
        self.sink, self.left = plan.sink, plan.window
        windowed = [group for group in range(groups) if group not in plan.groups]
        self.parts = [("", windowed, Window.of((plan.window, 0)))]
        if plan.groups:
            self.parts = [("", list(plan.groups), ALL_BEFORE), (OF_WINDOW, *self.parts[0][1:])]

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        forward: Forward,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """(B, heads, L, e) each → (B, L, heads, e).

        Args:
            scaling: of q·k; e**-0.5 by default.
            dropout: on the softmax.
            softcap: s, for logits s tanh(logit / s).
            s_aux: (heads,) logits of one more column of the softmax.
            others: what transformers tells the attention of the teacher, such as its own window.
        """
        if query.dtype != value.dtype or key.dtype != value.dtype:  # under autocast the angles are float32
            query, key = query.to(value.dtype), key.to(value.dtype)
        heads = [query, key, value]
        if len(self.parts) > 1:
            of_all = [self._of_groups(x, self.parts[0][1]) for x in (forward.scaled(query, value.dtype), key, value)]
            heads = [*of_all, *(self._of_groups(x, self.parts[1][1]) for x in heads)]
        inputs = [x.transpose(1, 2) for x in heads]
        options: dict[str, Any] = {"scale": query.shape[-1] ** -0.5 if scaling is None else scaling}
        options |= {"dropout": dropout, "softcap": softcap, "s_aux": s_aux, "ranks": forward.ranks}
        options["has_logits"] = self.sink == "constant" and (
            forward.ranks is None or forward.ranks.without_sink(self.left) is not True
        )
        if options["has_logits"]:
            sink: ConstantSink = module.sink
            angles = None if self.place is None else forward.angles[self.place]
            logits, options["sink_values"] = sink(heads[-3], angles, forward.sink_keys.get(self.layer_idx))
            inputs.append(logits)
        beside = forward.beside
        if beside is None:
            return self.forward_with_cache(*inputs, rows=forward.rows, cache=forward.cache, **options)
        options["memory"], inputs = beside.memory, [*inputs, *beside.inputs]
        both = self.forward_with_cache(*inputs, rows=forward.rows, cache=forward.cache, **options)
        size = query.shape[1] * value.shape[3]
        beside.output = both[..., size:]
        return both[..., :size].unflatten(2, (query.shape[1], -1))

    def _of_groups(self, heads: torch.Tensor, groups: list[int]) -> torch.Tensor:
        """(B, heads, L, e) → those of some key/value groups."""
        by_group = heads.unflatten(1, (self.groups, -1))
        return torch.cat([by_group[:, group] for group in groups], 1)

    def forward_rows(
        self,
        *inputs: torch.Tensor,
        past: States,
        rows: Rows,
        s_aux: torch.Tensor | None,
        has_logits: bool,
        memory: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, States]:
        outputs: list[torch.Tensor] = []
        states: States = {}
        count = 3 * len(self.parts)
        logits = inputs[count] if has_logits else None
        for index, (prefix, groups, window) in enumerate(self.parts):
            heads = [x.transpose(1, 2) for x in inputs[3 * index : 3 * index + 3]]
            own = s_aux
            if s_aux is not None and len(self.parts) > 1:
                own = s_aux.unflatten(0, (self.groups, -1))[groups].flatten()
            is_windowed = window.left is not None
            attend = self._with_first_token if is_windowed and self.sink == "first_token" else self._attend
            output, after = attend(
                *heads, prefix=prefix, window=window, past=past, rows=rows, s_aux=own,
                logits=logits if is_windowed else None, **options,
            )  # fmt: skip
            outputs.append(output.transpose(1, 2))
            states |= after
        if memory is None:
            return self._together(outputs), states
        remembered, more = memory(*inputs[count + has_logits :], past=past, rows=rows)
        return torch.cat([self._together(outputs).flatten(2), remembered], 2), states | more

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        prefix: str,
        window: Window,
        past: States,
        rows: Rows,
        scale: float,
        softcap: float | None,
        dropout: float,
        s_aux: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        ranks: Ranks | None = None,
        sink_values: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, States]:
        """One part's (B, heads, L, e) each → (B, heads, L, e) and its states.

        Args:
            logits: (B, L, heads), q·k of a sink.
        """
        if isinstance(served := past.get("keys"), ServedKeys) and window.left is None:
            return self._ask(served, query, key, value, scale=scale, softcap=softcap, s_aux=s_aux), {}
        sink: dict[str, Any] = {}
        if s_aux is not None:
            sink["sink_logits"] = s_aux.float()[None, :, None].expand(query.shape[:3])
        elif logits is not None:
            logits = _capped(logits * scale, softcap).transpose(1, 2)
            without = False if ranks is None or window.left is None else ranks.without_sink(window.left)
            if isinstance(without, torch.Tensor):
                logits = logits.masked_fill(without.unsqueeze(1), float("-inf"))
            sink = {"sink_logits": logits, "sink_values": sink_values}
        output, state = local_attention(
            query,
            key,
            value,
            window=window,
            scale=scale,
            softcap=softcap,
            dropout=dropout,
            rows=rows,
            initial_state=_state(past, prefix),
            **sink,
        )
        return output, {} if state is None else _named(state, prefix)

    def _ask(self, served: ServedKeys, *heads: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attention to all tokens by a server, of as many groups in every layer, since its pages have one size: zeros
        fill up."""
        missing, shared = self.most_groups - heads[1].shape[1], heads[0].shape[1] // heads[1].shape[1]
        counts = (missing * shared, missing, missing)
        wide = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, more)) for x, more in zip(heads, counts))
        by_head = served.attend(*wide, **options).unflatten(2, (-1, heads[2].shape[3]))
        return by_head[:, :, : heads[0].shape[1]].transpose(1, 2)

    def _with_first_token(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        prefix: str,
        past: States,
        rows: Rows,
        ranks: Ranks,
        **options: Any,
    ) -> tuple[torch.Tensor, States]:
        """`_attend` where a token also sees the first one of its document.

        A column of ones beside the values comes back as the share of the keys in the window; the rest is the first
        token's.
        """
        firsts = first_tokens(key, value, ranks.values, past, prefix)
        values, options = _with_ones(value), options | {"prefix": prefix, "past": past, "rows": rows, "ranks": ranks}
        if ranks.without_sink(self.left) is not True:
            options["logits"] = products(query, firsts[0])
        output, states = self._attend(query, key, values, **options)
        share, output = output[..., -1:], output[..., :-1]
        without = ranks.without_sink(self.left)
        if without is not True:
            rest = 1 - share if without is False else (1 - share).masked_fill(without[:, None, :, None], 0.0)
            by_group = rest.unflatten(1, (firsts[1].shape[1], -1)) * firsts[1].unsqueeze(2)
            output = output + by_group.flatten(1, 2)
        return output, states | (last_of(firsts, rows, past, prefix) if states else {})

    def _together(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """(B, L, heads, e) of each part → of all groups in their order."""
        if len(outputs) == 1:
            return outputs[0]
        by_group: dict[int, torch.Tensor] = {}
        for output, (_, groups, _) in zip(outputs, self.parts):
            by_group |= dict(zip(groups, output.chunk(len(groups), 2)))
        return torch.cat([by_group[group] for group in range(self.groups)], 2)

    def states_after(
        self,
        *inputs: torch.Tensor,
        past: States,
        rows: Rows,
        has_logits: bool = False,
        memory: Any = None,
        **options: Any,
    ) -> States:
        """The keys and values alone, without attending; and the states of a memory."""
        states: States = {}
        if memory is not None:
            states = memory.states_after(*inputs[3 * len(self.parts) + has_logits :], past=past, rows=rows)
        for index, (prefix, _, window) in enumerate(self.parts):
            key, value = (x.transpose(1, 2) for x in inputs[3 * index + 1 : 3 * index + 3])
            before = _state(past, prefix)
            if window.left is not None and self.sink == "first_token":
                seen = None if before is None else before.seen
                ranks = document_ranks(key.shape[2], seen=seen, seq_idx=rows.seq_idx, device=key.device)
                states |= last_of(first_tokens(key, value, ranks, past, prefix), rows, past, prefix)
                value = _with_ones(value)
            states |= _named(append_to_window(before, key, value, window.left, rows), prefix)
        return states


def _with_ones(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, torch.ones_like(values[..., :1])], -1)


def _capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def _state(past: States, prefix: str) -> AttentionState | None:
    if prefix + "keys" not in past:  # nor beside keys that a server has just begun to keep
        return None
    return AttentionState(*(past[prefix + name] for name in AttentionState._fields))


def _named(state: AttentionState, prefix: str) -> States:
    return {prefix + name: tensor for name, tensor in state._asdict().items()}


def student_attention(
    module: nn.Module, *heads: torch.Tensor, student: Forward | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What transformers' attention layers of a student call.

    Raises:
        ValueError: a layer was called alone, without what the student's forward hands down.
    """
    if student is None:
        raise ValueError(
            f"{type(module).__name__} of a student was called without `student`, which the forward of the model "
            "hands down to its layers: call the model."
        )
    return student.attend(module, *heads, **options)


def implementation(own: str) -> str:
    """The name under which students attend where `own` is the teacher's attention; registered with transformers.

    Raises:
        ValueError: it is one that reads its name in the configuration.
    """
    if "flash" in own:
        raise ValueError(
            f"attn_implementation={own!r}: students attend by 'sdpa', which takes torch's flash attention, or 'eager'."
        )
    name = PREFIX + own
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, student_attention)
        AttentionMaskInterface.register(name, partial(_mask, own))
    return name


def _mask(own: str, *args: Any, config: Any = None, local_size: int | None = None, **options: Any) -> Any:
    """The mask of attention that is the teacher's own; None where no layer takes it: windows take none."""
    of_window = local_size is not None and getattr(config, "attention_chunk_size", None) is None
    if of_window or "full" not in config.plan.own_kinds:
        return None
    padding = options.get("attention_mask")
    if padding is not None and not can_read_values(padding):  # which is looked at to leave the mask out
        options["allow_is_causal_skip"] = False
    if padding is None and local_size is None and _is_whole(options):
        # where positions cannot be read, transformers takes every row for a packed one: `Forward` knows the documents
        options |= {"mask_function": causal_mask_function, "allow_is_causal_skip": True}
    return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, config=config, local_size=local_size, **options)


def _is_whole(options: dict[str, Any]) -> bool:
    """Whether the mask is of all tokens to all, without a cache, and a teacher adds nothing to what is causal."""
    offset, length = options.get("q_offset"), options.get("q_length")
    if isinstance(offset, torch.Tensor):  # what a static cache counts, whose value no graph may ask for
        return False
    return offset == 0 and length == options.get("kv_length") and not options.get("use_vmap", True)
