"""The stages of upcycling as losses of a Trainer: align, distil, finetune."""

from dataclasses import dataclass
from typing import Any

from _lib.teacher_states import TeacherStates
from _lib.training import LanguageTrainer

import torch

from hf_hybrid_ssm.upcycle import Teacher, alignment_losses, distillation_loss, fused_distillation_loss
from hf_hybrid_ssm.upcycle.objectives import beyond_window, has_plain_head


@dataclass(frozen=True)
class Stage:
    """How a student learns.

    Attributes:
        name: align, distil or finetune.
        temperature: of the distributions, in distil.
        window: of the student, if it has one.
        within: the weight of tokens that the window still shows, in align and distil.
        states: where the teacher's last hidden states are kept, for distil; the rows then have a column `row`.
    """

    name: str
    teacher: Teacher
    temperature: float = 1.0
    window: int | None = None
    within: float = 1.0
    states: TeacherStates | None = None


class StageTrainer(LanguageTrainer):
    """Trains by the loss of a stage; evaluates by the next token's loss, whatever the stage."""

    def __init__(self, *args: Any, stage: Stage, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.stage = stage
        if stage.name != "finetune":
            self.model_accepts_loss_kwargs = False  # the Trainer divides by the accumulation steps itself

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if self.stage.states is not None and "row" not in self._signature_columns:
            self._signature_columns.append("row")

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        row = inputs.pop("row", None)
        if self.stage.name == "finetune" or not model.training:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        given = {name: value for name, value in inputs.items() if name != "labels"}
        weights = None
        if self.stage.window is not None and self.stage.within < 1:
            weights = beyond_window(self.stage.window, self.stage.within, **given)
        if self.stage.name == "align":
            student = self.accelerator.unwrap_model(model)
            losses = alignment_losses(student, self.stage.teacher.model, token_weights=weights, **given)
            return torch.stack(list(losses.values())).mean()
        return self._distillation(model, self._teacher_states(given, row), weights, given)

    def _teacher_states(self, given: dict[str, Any], row: torch.Tensor | None) -> torch.Tensor:
        """The teacher's last hidden states (B, L, d), kept or computed."""
        base = self.stage.teacher.model.base_model

        def compute() -> torch.Tensor:
            with torch.no_grad():
                return base(**given, use_cache=False).last_hidden_state

        return compute() if self.stage.states is None or row is None else self.stage.states.of(row, compute)

    def _distillation(self, model: Any, states: torch.Tensor, weights: Any, given: dict[str, Any]) -> torch.Tensor:
        """Without whole logits where both heads are plain matrices."""
        teacher, student = self.stage.teacher, self.accelerator.unwrap_model(model)
        student = student.get_base_model() if hasattr(student, "get_base_model") else student
        if has_plain_head(student) and has_plain_head(teacher.model):
            head = teacher.model.get_output_embeddings().weight
            options = {"forward": model, "token_weights": weights, "temperature": self.stage.temperature}
            return fused_distillation_loss(student, states, head, **options, **given)
        with torch.no_grad():
            wanted = teacher.logits(states.to(teacher.model.device, teacher.model.dtype))
        return distillation_loss(model(**given).logits, wanted, self.stage.temperature, weights)
