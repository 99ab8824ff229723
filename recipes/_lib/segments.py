"""Training that carries each row's state from one segment of a long document to the next, without gradient.

Rows of a batch are lanes: lane l reads its share of the text from front to back, a segment a step, so that no document
is shuffled. The state a lane ended with is where its next segment begins; a lane whose next document begins starts
from zero (section 10 of Block-State Transformers' outlook; Transformer-XL's cache).
"""

from typing import Any

from _lib.training import LanguageTrainer

import torch
from datasets import Dataset
from transformers import Cache, TrainingArguments, default_data_collator

from hf_hybrid_ssm.training.segments import carry_segment


def check_lanes(rows: Any, training: TrainingArguments) -> None:
    """Refuse settings that would break up the lanes, before any training.

    Raises:
        ValueError: shuffled batches, streamed data, several processes or gradient checkpointing.
    """
    if any(getattr(training, name, False) for name in ("activation_checkpointing", "gradient_checkpointing")):
        raise ValueError("carry_segments=True carries a cache, which activation_checkpointing=true takes away.")
    if training.train_sampling_strategy != "sequential":
        raise ValueError(
            f"carry_segments=True with train_sampling_strategy={training.train_sampling_strategy!r} would shuffle the "
            "segments of a document; set train_sampling_strategy=sequential."
        )
    if not isinstance(rows, Dataset):
        raise ValueError("carry_segments=True needs to know how many rows there are: set streaming=False.")
    if training.world_size > 1:
        raise ValueError(f"carry_segments=True runs in one process, not in {training.world_size}.")


def in_lanes(rows: Dataset, lanes: int) -> Dataset:
    """Packed rows reordered, so that batch s holds row s of each lane, and with the column `begins`.

    Args:
        rows: of `documents.packed_rows`, with `continues`: the row continues the document of the previous row.
        lanes: the batch size; up to `lanes - 1` rows at the end are left out.

    Raises:
        ValueError: fewer rows than lanes.
    """
    steps = len(rows) // lanes
    if steps == 0:
        raise ValueError(f"{len(rows)} rows cannot fill a batch of {lanes}: lower the batch size or sequence_length.")
    order = [lane * steps + step for step in range(steps) for lane in range(lanes)]
    begins = [
        step == 0 or not rows[lane * steps + step]["continues"] for step in range(steps) for lane in range(lanes)
    ]
    return rows.select(order).remove_columns("continues").add_column("begins", [int(begin) for begin in begins])


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch whose documents are named by `seq_idx`; the first of a row goes on with the state that is carried to it,
    though positions begin at 0 in each row."""
    batch = default_data_collator(rows)
    positions = batch.pop("position_ids")
    starts = (positions == 0).long()
    starts[:, 0] = 0
    return batch | {"seq_idx": starts.cumsum(1), "continues_documents": True}


class SegmentTrainer(LanguageTrainer):
    """`Trainer` on batches of `in_lanes`. A resumed run starts its first segments without a state."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._carried: dict[bool, Cache | None] = {True: None, False: None}

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._carried[False] = None
        return super().evaluate(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        begins, training = inputs.pop("begins").bool(), model.training
        carried = self._carried[training]
        if carried is not None:
            carry_segment(carried, begins)
        inputs |= {"cache": carried, "use_cache": True}
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self._carried[training] = outputs.cache
        return (loss, outputs) if return_outputs else loss
