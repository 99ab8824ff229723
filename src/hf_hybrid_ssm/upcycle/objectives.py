"""What a student learns from its teacher: the output of each attention, and the next token's distribution."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from hf_hybrid_ssm.ops.linear_kl_divergence import linear_kl_divergence
from hf_hybrid_ssm.students.teacher import attention_layers


@contextmanager
def _attention_records(teacher: Any, names: dict[int, str]) -> Iterator[dict[int, dict[str, torch.Tensor]]]:
    """The input of some layers and the output of their attention (its name by layer), while the teacher runs."""
    records: dict[int, dict[str, torch.Tensor]] = {index: {} for index in names}

    def hooks_of(index: int) -> Any:
        def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            records[index]["layer_input"] = args[0] if args else kwargs["hidden_states"]

        def after(module: Any, args: Any, output: Any) -> None:
            records[index]["output"] = output[0]

        return before, after

    with ExitStack() as hooks:
        for index, name in names.items():
            before, after = hooks_of(index)
            layer, attention = (teacher.base_model.get_submodule(each) for each in (name.rpartition(".")[0], name))
            hooks.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(attention.register_forward_hook(after))
        yield records


class _Aligned(nn.Module):
    """A layer of the student that is given the teacher's input, and keeps what its attention and memory give."""

    def __init__(self, layer: nn.Module, attention: nn.Module, given: torch.Tensor):
        super().__init__()
        self.layer, self.attention, self.given = layer, attention, given

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a model may ask its layers what they are
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer: Any = self.layer
        detached = self.attention.register_forward_pre_hook(_detached, with_kwargs=True, prepend=True)
        is_checkpointed = getattr(layer, "gradient_checkpointing", False)
        layer.gradient_checkpointing = False  # what is kept lies inside
        try:
            with detached, self.attention.register_forward_hook(self._keep):
                layer(self.given, *args, **kwargs)
        finally:
            layer.gradient_checkpointing = is_checkpointed
        return hidden_states

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        self.added = output[0]


def _detached(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if args:
        return (args[0].detach(), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].detach()}


class _Passed(nn.Module):
    """In the place of a layer that is not asked."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    __getattr__ = _Aligned.__getattr__

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def alignment_losses(
    student: Any, teacher: PreTrainedModel, *, token_weights: torch.Tensor | None = None, **inputs: Any
) -> dict[int, torch.Tensor]:
    """How far each attention with a memory, or each memory in the place of one, is from the teacher's attention, given
    the teacher's own input to it.

    Σ w |student(u) - attention(u)|² / Σ w |attention(u)|² over the tokens, by layer; gradients reach these attentions
    and memories alone. Documents of packed rows (`position_ids`) are kept apart.

    Args:
        token_weights: w (B, L), such as `beyond_window` gives; by default every token counts alike.
        inputs: `input_ids` (B, L) and what else the teacher's forward takes; labels are left out.
    """
    known = attention_layers(student.config, student.config.teacher_type)
    plan = student.config.plan.layers
    names = {index: layer.name for index, layer in known.items() if plan[index].memory is not None}
    text = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad(), _attention_records(teacher, names) as records:
        teacher.base_model(**text, use_cache=False)
    base: Any = student.base_model
    where = next(iter(known.values())).name.rpartition(".")[0].rpartition(".")[0]
    own: Any = base.get_submodule(where)
    asked: dict[int, _Aligned] = {
        index: _Aligned(own[index], base.get_submodule(name), records[index]["layer_input"].to(student.device))
        for index, name in names.items()
    }
    base.set_submodule(where, nn.ModuleList(asked.get(index, _Passed(layer)) for index, layer in enumerate(own)))
    try:
        base(**text, use_cache=False)
    finally:
        base.set_submodule(where, own)
    losses = {}
    for index, layer in asked.items():
        wanted = records[index]["output"].to(student.device).float()
        weights = torch.ones_like(wanted[..., :1]) if token_weights is None else token_weights.to(wanted)[..., None]
        distance = (weights * (layer.added.float() - wanted).square()).sum()
        losses[index] = distance / (weights * wanted.square()).sum()
    return losses


def beyond_window(window: int, within: float, **inputs: torch.Tensor) -> torch.Tensor:
    """Weights (B, L) of tokens: 1 where more than `window` tokens of the document come before, `within` elsewhere.

    What a window holds, a student has from its teacher; what lies beyond is for its new parts to learn.

    Args:
        within: above 0 and at most 1.
        inputs: `input_ids` (B, L), and `position_ids`, which begin with 0 in each document, if rows are packed.
    """
    if not 0 < within <= 1:
        raise ValueError(f"within={within} must lie above 0 and at most at 1.")
    ids = inputs["input_ids"]
    ranks = inputs.get("position_ids")
    ranks = torch.arange(ids.shape[1], device=ids.device) if ranks is None else ranks
    return torch.where(ranks > window, 1.0, within).expand(ids.shape)


def distillation_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    temperature: float = 1.0,
    token_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """T² KL(teacher || student) of the distributions at temperature T, the mean over tokens, in nats.

    Args:
        student_logits, teacher_logits: (..., V).
        token_weights: (...), of a weighted mean; by default every token counts alike.

    Raises:
        ValueError: the vocabularies or the temperature do not allow it.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)} and teacher_logits {tuple(teacher_logits.shape)} must be "
            "of one shape."
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive.")
    ours = F.log_softmax(student_logits.float() / temperature, dim=-1).flatten(0, -2)
    theirs = F.log_softmax(teacher_logits.float().to(ours.device) / temperature, dim=-1).flatten(0, -2)
    if token_weights is None:
        return F.kl_div(ours, theirs, log_target=True, reduction="batchmean") * temperature**2
    weights = token_weights.to(ours).flatten()
    divergences = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    return (weights * divergences).sum() / weights.sum() * temperature**2


@contextmanager
def _last_hidden_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """What the base model of a causal language model returns while it runs, (B, L, d) each."""
    outputs: list[torch.Tensor] = []
    with model.get_decoder().register_forward_hook(lambda module, args, output: outputs.append(output[0])):
        yield outputs


_LOGITS_ARE_PLAIN: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Models whose logits were compared with those of their heads."""


def has_plain_head(model: Any) -> bool:
    """Whether logits are one matrix times what the base model returns: no adapter, no shards, nothing that scales or
    caps them."""
    head = model.get_output_embeddings()
    if not (type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.bias is None):
        return False
    if model not in _LOGITS_ARE_PLAIN:
        _LOGITS_ARE_PLAIN[model] = _are_plain(model, head)
    return _LOGITS_ARE_PLAIN[model]


@torch.no_grad()
def _are_plain(model: Any, head: nn.Linear) -> bool:
    one, training = torch.zeros(1, 1, dtype=torch.int64, device=model.device), model.training
    model.eval()
    try:
        with _last_hidden_states(model) as outputs:
            logits = model(input_ids=one, use_cache=False).logits
    finally:
        model.train(training)
    return torch.allclose(logits.float(), head(outputs[0]).float(), rtol=1e-3, atol=1e-5)


def fused_distillation_loss(
    student: Any,
    teacher_states: torch.Tensor,
    teacher_head: torch.Tensor,
    *,
    forward: Any = None,
    token_weights: torch.Tensor | None = None,
    temperature: float = 1.0,
    **inputs: Any,
) -> torch.Tensor:
    """`distillation_loss` without whole logits of either model: from last hidden states, in chunks of tokens.

    Args:
        student: a causal language model with a plain head (`has_plain_head`).
        teacher_states: (B, L, d), of the teacher's base model, in any float dtype; stored ones may be narrower.
        teacher_head: (V, d), the weight of its head.
        forward: what is called with the inputs in the student's place, such as a module around it that shares its
            gradients out; by default the student.
        token_weights: (B, L), such as `beyond_window` gives; by default every token counts alike.
        inputs: of the student's forward, without labels.
    """
    with _last_hidden_states(student) as outputs:
        (student if forward is None else forward)(**inputs, use_cache=False, logits_to_keep=1)
    hidden = outputs[0]
    head = student.get_output_embeddings().weight
    return linear_kl_divergence(
        hidden,
        head.to(hidden.dtype),  # under autocast hidden states are narrower than weights
        teacher_states.to(hidden),
        teacher_head.to(hidden),
        row_weights=None if token_weights is None else token_weights.to(hidden.device),
        temperature=temperature,
    )
