"""What a student learns from its teacher: the output of each replaced attention, and the next token's distribution."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornForCausalLM


@contextmanager
def _attention_records(teacher: Any, layers: list[int]) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Input and output of the attention of some layers, while the teacher runs."""
    records: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def hook_of(index: int):
        def hook(module, args, kwargs, output):
            records[index] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output[0])

        return hook

    hooks = [
        teacher.model.layers[index].self_attn.register_forward_hook(hook_of(index), with_kwargs=True)
        for index in layers
    ]
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def alignment_losses(student: LonghornForCausalLM, teacher: PreTrainedModel, **inputs: Any) -> dict[int, torch.Tensor]:
    """How far each new mixer is from the attention it replaces, given the teacher's own input to it.

    |mixer(u) - attention(u)|² / |attention(u)|², by layer; gradients reach the mixers alone.

    Args:
        inputs: `input_ids` (B, L) and what else the teacher's forward takes; labels are left out.
    """
    layers = [index for index, layer in enumerate(student.model.layers) if layer.is_recurrent]
    given = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad(), _attention_records(teacher, layers) as records:
        teacher.model(**given, use_cache=False)
    losses = {}
    for index in layers:
        hidden, wanted = (part.to(student.device) for part in records[index])
        found = student.model.layers[index].mixer(hidden).float()
        losses[index] = F.mse_loss(found, wanted.float()) / wanted.float().square().mean()
    return losses


def distillation_loss(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """T² KL(teacher || student) of the distributions at temperature T, the mean over tokens, in nats.

    Args:
        student_logits, teacher_logits: (..., V).

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
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean") * temperature**2
