"""The teacher's last hidden states of each row of text, kept on disk: computed once, read again by every later pass.

A number takes two bytes (bfloat16), a token of a model of width 576 1.2 kB. Rows are filled in as they are first asked
for, so that a killed run has lost none of them; students, seeds and passes share them. They belong to the weights of
the teacher and to the tokens of the rows.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _lib.rows import RowStream
from _lib.training import write_json

import numpy as np
import torch
from datasets import Dataset

from hf_hybrid_ssm.hub.fingerprint import fingerprint_of

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
