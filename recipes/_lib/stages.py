"""The stages of upcycling as losses of a Trainer: align, distil, finetune; and the teacher's states that they keep.

The last hidden states of each row of text lie on disk: computed once, read again by every later pass. A number takes
two bytes (bfloat16), a token of a model of width 576 1.2 kB. Rows are filled in as they are first asked for, so that a
killed run has lost none of them; students, seeds and passes share them. They belong to the weights of the teacher and
to the tokens of the rows.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _lib.rows import RowStream
from _lib.training import LanguageTrainer, write_json

import numpy as np
import torch
from datasets import Dataset

from hf_hybrid_ssm.hub.fingerprint import fingerprint_of
from hf_hybrid_ssm.upcycle import Teacher, alignment_losses, distillation_loss, fused_distillation_loss
from hf_hybrid_ssm.upcycle.objectives import beyond_window, has_plain_head

BYTES = 2


class TeacherStates:
    """Last hidden states (rows, L, d) in bfloat16, in a folder of their own below `folder`.

    Args:
        folder: for all teachers and texts.
        teacher: its base model's `last_hidden_state` is what is kept.
        rows: of one length, in an order that stays.
        read: how many of them will be, at most, where that is known: the others take no room.

    Raises:
        ValueError: the rows are streamed, or the states need more room than is free.
    """

    def __init__(self, folder: str | Path, teacher: Any, rows: Dataset, read: int | None = None):
        if isinstance(rows, RowStream):
            raise ValueError("teacher_states needs rows that stay the same: streaming=false.")
        ids = np.asarray(rows.with_format("numpy")["input_ids"][:], dtype=np.int64)
        positions = np.asarray(rows.with_format("numpy")["position_ids"][:], dtype=np.int64)
        self.shape = (*ids.shape, teacher.config.hidden_size)
        about = {
            "teacher": fingerprint_of(teacher.state_dict()),
            "rows": hashlib.sha256(ids.tobytes() + positions.tobytes()).hexdigest(),
            "shape": list(self.shape),
        }
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        where = Path(folder) / name
        count = int(np.prod(self.shape))
        _check_room(where, count * BYTES * min(len(ids), read or len(ids)) // len(ids))
        where.mkdir(parents=True, exist_ok=True)
        write_json(where / "about.json", about)
        options: Any = {"shared": True}  # written where it is read, page by page
        self.states = torch.from_file(str(where / "states"), size=count, dtype=torch.bfloat16, **options)
        self.states = self.states.view(self.shape)
        self.done = torch.from_file(str(where / "done"), size=len(ids), dtype=torch.uint8, **options)

    def of(self, rows: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The states (B, L, d) of rows (B,); `compute` gives those of this batch where some are not there yet."""
        rows = rows.cpu()
        if not bool(self.done[rows].all()):
            self.states[rows] = compute().detach().to("cpu", torch.bfloat16)
            self.done[rows] = 1
        return self.states[rows]


def _check_room(where: Path, needed: int) -> None:
    states, parent = where / "states", next(path for path in where.absolute().parents if path.is_dir())
    held = states.stat().st_blocks * 512 if states.is_file() else 0
    free = shutil.disk_usage(parent).free
    if needed - held > free:
        raise ValueError(
            f"teacher_states={str(where.parent)!r}: the teacher's states of this text take {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free there."
        )


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
    """Trains by the loss of a stage; evaluates by the next token's loss, whatever the stage.

    Rows may bring `token_weights` (L,) for align and distil, where the stage gives none.
    """

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
        row, weights = inputs.pop("row", None), inputs.pop("token_weights", None)
        if self.stage.name == "finetune" or not model.training:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        given = {name: value for name, value in inputs.items() if name != "labels"}
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
