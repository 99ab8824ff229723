"""Sequence parallelism: Longhorn on several processes, each of which holds one shard of every row.

To continue a sequence, a Longhorn layer needs only the last inputs of its short convolution and the state of its scan.
A process receives these two from the previous one, layer by layer, and sends its own to the next; the backward sends
their gradients the other way. The memory for activations and logits is divided by the number of processes.

    outputs = forward_shard(model, input_ids, labels=labels)  # the whole rows, on every process
    outputs.loss.backward()
    sum_gradients(model)

Within a layer the processes work one after the other, because a recurrence is sequential. But a process continues with
its next layer as soon as it has sent its state, so that with R processes and N layers all of them are busy after R - 1
layers: if sending took no time, a forward would take (N + R - 1) / (N R) of the time of one process. This is an
estimate, not a measurement.

Only for stacks of Longhorn layers: attention would need the keys of all earlier shards. Padding and gradient
checkpointing, which would receive the states a second time, are not supported.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_hybrid_ssm.models import FAMILIES, family_of
from hf_hybrid_ssm.models.configuration import STATE_LAYER_TYPE
from hf_hybrid_ssm.models.outputs import CACHE, CausalLMOutputWithCache
from hf_hybrid_ssm.models.packing import PackedRows, States, packed_rows
from hf_hybrid_ssm.models.state_layers import Recompute, RecurrentStateLayer


def forward_shard(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    labels: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> CausalLMOutputWithPast:
    """The forward of this process's shard of every row. All processes of the group call it with the same arguments.

    Args:
        model: a `LonghornForCausalLM` whose layers are all recurrent, the same on every process.
        input_ids: (B, L) whole rows without padding, L at least the number of processes.
        labels: (B, L), usually `input_ids`; the last token of a shard predicts the first one of the next.
        seq_idx: (B, L) int, documents of packed rows.
        group: the processes, in the order of the shards; all of them by default.

    Returns:
        `logits` of the shard; `loss`, the shard's share of the mean over the rows (the shares of all processes add up
        to it); `cache`, on the last process only: the state after the rows, to decode from.

    Raises:
        ValueError: attention layers, gradient checkpointing, or rows shorter than the number of processes.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    batch, length = input_ids.shape
    _check(model, length, ranks)
    begin, end = rank * length // ranks, (rank + 1) * length // ranks
    continues = None if seq_idx is None or rank == 0 else seq_idx[:, begin - 1] == seq_idx[:, begin]
    cache = DynamicCache(config=model.config)
    cache.layers = [_ShardLayer(model, batch, group, continues) for _ in cache.layers]
    options: dict[str, Any] = {} if seq_idx is None else {"seq_idx": seq_idx[:, begin:end]}
    if labels is not None:
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        options |= {"labels": labels[:, begin:end], "shift_labels": shifted[:, begin:end].contiguous()}
        options["num_items_in_batch"] = (shifted != -100).sum()
    outputs = model(input_ids[:, begin:end], cache=cache, use_cache=True, **options)
    receipts = [layer.send_token for layer in cache.layers if layer.send_token is not None]
    loss, logits = outputs.loss, outputs.logits
    if receipts:  # a backward from the loss, or without labels from the logits, must reach the states that were sent
        loss = None if loss is None else _AttachBackward.apply(loss, *receipts)
        logits = logits if loss is not None else _AttachBackward.apply(logits, *receipts)
    final_cache = _final_cache(model, cache, length) if rank == ranks - 1 else None
    return CausalLMOutputWithCache(loss=loss, logits=logits, **{CACHE: final_cache})


def sum_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Add up the gradients of all processes, in place; then each process can step its own optimizer."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def _check(model: PreTrainedModel, length: int, ranks: int) -> None:
    kinds, own = set(getattr(model.config, "layer_types", ())), model.config.model_type
    is_recurrent = kinds in ({own}, {STATE_LAYER_TYPE})  # the family's own layers, or those of a family without others
    if family_of(own).recurrent_states is None or not is_recurrent:
        able = " or ".join(family.card.name for family in FAMILIES if family.card and family.recurrent_states)
        raise ValueError(
            f"model is a {type(model).__name__} with layers of type {', '.join(sorted(kinds))}; only stacks of {able} "
            "layers can be sharded along the sequence."
        )
    if model.get_decoder().uses_positions:
        raise ValueError(
            f"model is a {type(model).__name__} whose layers read positions of tokens, which a shard does not know."
        )
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError("gradient checkpointing would receive each state twice: disable it.")
    if length < ranks:
        raise ValueError(f"input_ids has {length} tokens a row for {ranks} processes; each needs at least one.")


class _ShardLayer(RecurrentStateLayer):
    """A layer's states: `states_before` receives them from the previous process, `update_states` sends those after the
    shard to the next one."""

    _layer_type = None  # no cache builds it by itself

    def __init__(
        self, model: PreTrainedModel, batch: int, group: dist.ProcessGroup | None, continues: torch.Tensor | None
    ):
        super().__init__()
        self.group, self.continues = group, continues
        weight = model.get_input_embeddings().weight
        self.wide, self.device = torch.promote_types(weight.dtype, torch.float32), weight.device
        shapes_of: Any = family_of(model.config.model_type).recurrent_states
        states = shapes_of(model.config)
        self.shapes = {name: (batch, *shape) for name, shape in states.items()}
        self.send_token: torch.Tensor | None = None

    def states_before(self) -> States:
        """All states in one message, zero where a document begins with the shard; none on the first process."""
        if dist.get_rank(self.group) == 0:
            return {}
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        trigger = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        message = _Receive.apply(trigger, sum(sizes), self.wide, self.group)
        parts = zip(self.shapes.items(), message.split(sizes))
        states = {name: part.view(shape) for (name, shape), part in parts}
        if self.continues is None:
            return states
        return {name: torch.where(self.continues[:, None, None], state, 0.0) for name, state in states.items()}

    def update_states(self, rows: PackedRows, states: States, recompute: Recompute | None = None) -> None:
        if dist.get_rank(self.group) < dist.get_world_size(self.group) - 1:
            message = torch.cat([states[name].to(self.wide).flatten() for name in self.shapes])
            self.send_token = _Send.apply(message, self.group)
        super().update_states(rows, states, recompute)


def _neighbour(group: dist.ProcessGroup | None, step: int) -> int:
    """The global rank of the previous (-1) or next (1) process."""
    place = dist.get_rank(group) + step
    return place if group is None else dist.get_global_rank(group, place)


def _refuse_second_derivative() -> None:
    """Messages of a backward carry numbers, and no graph."""
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True is not possible in sequence parallelism: it has no second derivatives.")


class _Send(torch.autograd.Function):
    """A message to the next process; the gradient comes back from it. Returns a zero that stands for the message."""

    @staticmethod
    def forward(ctx: Any, message: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group, ctx.size, ctx.dtype = group, message.numel(), message.dtype
        dist.send(message.detach().contiguous(), _neighbour(group, 1), group=group)
        return message.new_zeros(())

    @staticmethod
    def backward(ctx: Any, zero: torch.Tensor) -> tuple[torch.Tensor, None]:
        _refuse_second_derivative()
        gradient = zero.new_empty(ctx.size, dtype=ctx.dtype)
        dist.recv(gradient, _neighbour(ctx.group, 1), group=ctx.group)
        return gradient, None


class _Receive(torch.autograd.Function):
    """The message of the previous process; its gradient goes back there."""

    @staticmethod
    def forward(
        ctx: Any, trigger: torch.Tensor, size: int, dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.group = group
        message = trigger.new_empty(size, dtype=dtype)
        dist.recv(message, _neighbour(group, -1), group=group)
        return message

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        _refuse_second_derivative()
        dist.send(gradient.contiguous(), _neighbour(ctx.group, -1), group=ctx.group)
        return gradient.new_zeros(()), None, None, None


class _AttachBackward(torch.autograd.Function):
    """The first tensor, from which a backward also reaches the messages that were sent."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *receipts: torch.Tensor) -> torch.Tensor:
        ctx.receipts = [(send_token.dtype, send_token.device) for send_token in receipts]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros((), dtype=dtype, device=device) for dtype, device in ctx.receipts)


def _final_cache(model: PreTrainedModel, shards: DynamicCache, length: int) -> DynamicCache:
    """An ordinary cache with the states after the rows."""
    cache = DynamicCache(config=model.config)
    for layer, shard in zip(cache.layers, shards.layers):
        layer.update_states(packed_rows(length=length), shard.states)
    return cache
