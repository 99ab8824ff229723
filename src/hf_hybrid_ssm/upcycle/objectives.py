"""What a student learns from its teacher: the output of each attention, and the next token's distribution."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from hf_hybrid_ssm.ops.linear_kl_divergence import linear_kl_divergence
from hf_hybrid_ssm.upcycle.student import new_modules


@contextmanager
def _attention_records(teacher: Any, layers: list[int]) -> Iterator[dict[int, dict[str, torch.Tensor]]]:
    """The input of some layers and the output of their attention, while the teacher runs."""
    records: dict[int, dict[str, torch.Tensor]] = {index: {} for index in layers}

    def hooks_of(index: int):
        def before(module, args):
            records[index]["layer_input"] = args[0]

        def after(module, args, output):
            records[index]["output"] = output[0]

        return before, after

    hooks = []
    for index in layers:
        layer, (before, after) = teacher.model.layers[index], hooks_of(index)
        hooks.append(layer.register_forward_pre_hook(before))
        hooks.append(layer.self_attn.register_forward_hook(after))
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


class _Aligned(nn.Module):
    """A layer of the student that is given the teacher's input, and keeps what it adds to it before its feed-forward
    part."""

    def __init__(self, layer: nn.Module, given: torch.Tensor):
        super().__init__()
        self.layer, self.given = layer, given

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        before, after = (
            self._norm(*names) for names in (("norm", "attention_norm"), ("mlp_norm", "feed_forward_norm"))
        )
        hooks = [
            before.register_forward_hook(lambda module, args, normed: normed.detach()),
            after.register_forward_pre_hook(self._keep),
        ]
        try:
            self.layer.forward(self.given, *args, **kwargs)  # never checkpointed: what is kept lies inside
        finally:
            for hook in hooks:
                hook.remove()
        return x

    def _norm(self, *names: str) -> Any:
        return next(getattr(self.layer, name) for name in names if hasattr(self.layer, name))

    def _keep(self, norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.added = args[0] - self.given


class _Passed(nn.Module):
    """In the place of a layer that is not asked."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


def alignment_losses(
    student: Any, teacher: PreTrainedModel, *, token_weights: torch.Tensor | None = None, **inputs: Any
) -> dict[int, torch.Tensor]:
    """How far each new mixer, or each attention with context states, is from the teacher's attention, given the
    teacher's own input to it.

    Σ w |mixer(u) - attention(u)|² / Σ w |attention(u)|² over the tokens, by layer; gradients reach the mixers, or
    these attentions, alone. Documents of packed rows (`position_ids`) are kept apart.

    Args:
        token_weights: w (B, L), such as `beyond_window` gives; by default every token counts alike.
        inputs: `input_ids` (B, L) and what else the teacher's forward takes; labels are left out.
    """
    layers = sorted({int(name.split(".")[2]) for name in new_modules(student)})
    text = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad(), _attention_records(teacher, layers) as records:
        teacher.model(**text, use_cache=False)
    own: Any = student.model.layers
    asked: dict[int, _Aligned] = {
        index: _Aligned(own[index], records[index]["layer_input"].to(student.device)) for index in layers
    }
    student.model.layers = nn.ModuleList(asked.get(index, _Passed()) for index in range(len(own)))
    try:
        student.model(**text, use_cache=False)
    finally:
        student.model.layers = own
    losses = {}
    for index in layers:
        wanted = records[index]["output"].to(student.device).float()
        weights = torch.ones_like(wanted[..., :1]) if token_weights is None else token_weights.to(wanted)[..., None]
        distance = (weights * (asked[index].added.float() - wanted).square()).sum()
        losses[index] = distance / (weights * wanted.square()).sum()
    return losses


def memory_window(config: Any) -> int | None:
    """Tokens before its own that a student's window shows where something else is to remember what lies beyond:
    context states of a BST, or Longhorn mixers beside windows. None where no layer has both."""
    kinds = set(config.block_types)
    if config.model_type == "bst":
        return config.sliding_window if kinds - {"sliding_attention"} else None
    return config.sliding_window - 1 if "hybrid_sliding" in kinds else None  # Longhorn's counts the token itself


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
    hook = model.get_decoder().register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    try:
        yield outputs
    finally:
        hook.remove()


def has_plain_head(model: Any) -> bool:
    """Whether logits are one matrix times what the base model returns: no adapter, no shards."""
    head = model.get_output_embeddings()
    return type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.bias is None


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
    hidden = outputs[0] if not hasattr(student, "_pre_head") else student._pre_head(outputs[0])
    head = student.get_output_embeddings().weight
    return linear_kl_divergence(
        hidden,
        head.to(hidden.dtype),  # under autocast hidden states are narrower than weights
        teacher_states.to(hidden),
        teacher_head.to(hidden),
        row_weights=None if token_weights is None else token_weights.to(hidden.device),
        temperature=temperature,
    )
