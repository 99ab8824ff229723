"""What a student learns from its teacher: the output of each attention, and the next token's distribution."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_hybrid_ssm.models.bst.modeling_bst import BstForCausalLM
from hf_hybrid_ssm.upcycle.student import Student, new_modules


@contextmanager
def _attention_records(teacher: Any, layers: list[int]) -> Iterator[dict[int, dict[str, torch.Tensor]]]:
    """The input of some layers, and input and output of their attention, while the teacher runs."""
    records: dict[int, dict[str, torch.Tensor]] = {index: {} for index in layers}

    def hooks_of(index: int):
        def before(module, args):
            records[index]["layer_input"] = args[0]

        def after(module, args, kwargs, output):
            records[index]["input"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            records[index]["output"] = output[0]

        return before, after

    hooks = []
    for index in layers:
        layer, (before, after) = teacher.model.layers[index], hooks_of(index)
        hooks.append(layer.register_forward_pre_hook(before))
        hooks.append(layer.self_attn.register_forward_hook(after, with_kwargs=True))
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def alignment_losses(student: Student, teacher: PreTrainedModel, **inputs: Any) -> dict[int, torch.Tensor]:
    """How far each new mixer, or each attention with context states, is from the teacher's attention, given the
    teacher's own input to it.

    |mixer(u) - attention(u)|² / |attention(u)|², by layer; gradients reach the mixers, or these attentions, alone.

    Args:
        inputs: `input_ids` (B, L) and what else the teacher's forward takes; labels are left out.
    """
    layers = sorted({int(name.split(".")[2]) for name in new_modules(student)})
    given = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad(), _attention_records(teacher, layers) as records:
        teacher.model(**given, use_cache=False)
    losses = {}
    for index in layers:
        part = {name: value.to(student.device) for name, value in records[index].items()}
        found = _mixed(student, index, part["input"], part["layer_input"]).float()
        wanted = part["output"].float()
        losses[index] = F.mse_loss(found, wanted) / wanted.square().mean()
    return losses


def _mixed(student: Student, index: int, normed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a layer of the student adds to x (B, L, d), given the attention's input."""
    layer: Any = student.model.layers[index]
    if not isinstance(student, BstForCausalLM):
        return layer.mixer(normed)
    rows: dict[str, Any] = {"seq_idx": None, "lengths": None, "return_final_state": False}
    rows["position_embeddings"] = student.model.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
    return layer.attention(normed, x, {}, **rows)[0]


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
