"""Train a student on real texts and on recall.

Its kept layers or groups learn to recall facts of many kinds.

    python recipes/recall_training.py recipes/configs/upcycle/kinds_training_cpu.yaml teacher=FILE [key=value ...]

All of its weights learn the teacher's distribution of the next token. Rows are stretches of `train_files`: some plain,
most as a chat, where facts of the kinds that may be trained on (`HELD_IN`) lie between the lines and are asked for in
turns, beside sentences of the text that are to be continued. Rows are made from their number, so that a run that was
stopped goes on where it was. Writes the student to `output_dir`; recall_kinds.py asks it for the kinds that are held
out. `max_steps=0` writes it untrained.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from _lib.checks import check_output, clear_checkpoints, clear_weights
from _lib.documents import paths_of
from _lib.entry import start
from _lib.stages import Stage, StageTrainer
from _lib.training import checkpoint_to_resume, say

import torch
from torch.utils.data import Dataset
from transformers import TrainingArguments, default_data_collator, set_seed

from hf_hybrid_ssm.evaluation.recall_tasks.kinds import HELD_IN, KINDS
from hf_hybrid_ssm.evaluation.recall_tasks.questions import Question
from hf_hybrid_ssm.evaluation.recall_tasks.real_texts import INTRODUCTION, text_with_facts
from hf_hybrid_ssm.upcycle import Keep, load_teacher, upcycle

QUOTED = (6, 12)
"""Words of a sentence that are given, and at least as many that are asked for."""
SPACING = 128
"""A fact for each so many tokens of a row, at most, and at least half as many."""
ROOM_OF_TURN = 48
"""Tokens of a question with its answer, about."""


@dataclass
class RecallTrainingArguments:
    """Which student, and its rows."""

    teacher: str = field(metadata={"help": "a folder, a name on the Hub, or a .gguf file"})
    train_files: list[str] = field(metadata={"help": "JSON lines with a field text, document or dialogue, or text"})
    keep: list[Any] = field(metadata={"help": "layers, or [layer, group], that keep their attention to all tokens"})
    window: int = 256
    lengths: list[int] = field(
        default_factory=lambda: [1024, 1024, 2048], metadata={"help": "tokens of rows, in turn"}
    )
    plain: float = field(default=0.2, metadata={"help": "share of the rows that are text alone"})
    answer_weight: float = field(default=8.0, metadata={"help": "of a token of an answer; every other one has 1"})
    resume: str | None = field(
        default=None, metadata={"help": "a checkpoint folder, or auto for the newest complete one"}
    )
    overwrite: bool = field(default=False, metadata={"help": "start again in an output_dir that is not empty"})


class RecallRows(Dataset):
    """`input_ids` and `token_weights` (L,) of rows without end, made from a row's number."""

    def __init__(self, arguments: RecallTrainingArguments, tokenizer: Any, count: int, seed: int):
        self.files = paths_of(arguments.train_files)
        self.arguments, self.tokenizer, self.count, self.seed = arguments, tokenizer, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = random.Random(f"{self.seed} {index}")
        length = self.arguments.lengths[index % len(self.arguments.lengths)]
        file = draw.choice(self.files)
        is_plain = draw.random() < self.arguments.plain
        ids, answers = self._plain(file, length, draw) if is_plain else self._chat(file, length, draw)
        weights = torch.ones(len(ids))
        for first, last in answers:  # the distribution of a token is what is learned at the one before
            weights[first - 1 : last - 1] = self.arguments.answer_weight
        return {"input_ids": torch.tensor(ids[:length]), "token_weights": weights[:length]}

    def _plain(self, file: str, length: int, draw: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
        text = text_with_facts(self.tokenizer, file, length, 1, [], draw)
        return self._ids(text), []

    def _chat(self, file: str, length: int, draw: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
        """A text with facts, and as many questions about it as there is room for."""
        count = draw.randint(length // (2 * SPACING), length // SPACING)
        kinds = draw.choices(list(HELD_IN), k=count)
        questions = list({(made := KINDS[kind](draw)).question: made for kind in kinds}.values())
        room = length - ROOM_OF_TURN * (count + 1)
        text = text_with_facts(self.tokenizer, file, room, self.arguments.window + 1, questions, draw)
        facts = {fact for question in questions for fact in question.facts}
        questions += _quotes(text, facts, count // 3, draw)
        draw.shuffle(questions)
        messages, marks = [], []
        for number, question in enumerate(questions):
            asked = question.question if number else f"{INTRODUCTION}{text}\n\n{question.question}"
            messages += [{"role": "user", "content": asked}]
            before = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            start = len(self._ids(before + question.prefix))
            messages += [{"role": "assistant", "content": f"{question.prefix} {question.answer}".strip()}]
            marks.append((start, len(self._ids(f"{before}{question.prefix} {question.answer}".rstrip()))))
        ids = self._ids(self.tokenizer.apply_chat_template(messages, tokenize=False))
        return ids, marks

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _quotes(text: str, facts: set[str], count: int, draw: random.Random) -> list[Question]:
    """Lines of a text that are to be continued."""
    lines = [
        line.strip() for line in text.splitlines() if len(line.split()) >= sum(QUOTED) and line.strip() not in facts
    ]
    found = []
    for line in draw.sample(lines, min(count, len(lines))):
        words = line.split()
        first = draw.randint(0, len(words) - sum(QUOTED))
        given, rest = words[first : first + QUOTED[0]], words[first + QUOTED[0] : first + sum(QUOTED)]
        start = " ".join(given)
        found.append(Question((), f'How does the text go on after "{start}"?', f'"{start}', " ".join(rest)))
    return found


def train(arguments: RecallTrainingArguments, training: TrainingArguments) -> None:
    """The student, trained, in `output_dir`.

    Raises:
        ValueError: the settings say no number of steps, or several rows at once, which differ in length.
    """
    check_output(training.output_dir, arguments.overwrite, arguments.resume)
    if training.max_steps < 0:
        raise ValueError("rows have no end: give max_steps.")
    if training.per_device_train_batch_size != 1:
        raise ValueError(
            f"per_device_train_batch_size={training.per_device_train_batch_size} must be 1, since rows differ in "
            "length: give gradient_accumulation_steps."
        )
    set_seed(training.seed)
    training.remove_unused_columns, training.train_sampling_strategy = False, "sequential"  # rows go by their number
    teacher = load_teacher(arguments.teacher, torch.float32)
    student, report = upcycle(teacher, Keep(arguments.keep, window=arguments.window))
    say(report)
    teacher.model.to(torch.bfloat16 if training.bf16 else torch.float32).requires_grad_(False)
    count = training.max_steps * training.gradient_accumulation_steps * training.per_device_train_batch_size
    rows = RecallRows(arguments, teacher.tokenizer, count, training.seed)
    collator, stage = default_data_collator, Stage("distil", teacher)
    trainer = StageTrainer(model=student, args=training, train_dataset=rows, data_collator=collator, stage=stage)
    clear_checkpoints(training.output_dir, arguments.overwrite, arguments.resume)
    if training.max_steps:
        trainer.train(resume_from_checkpoint=checkpoint_to_resume(arguments.resume, training.output_dir))
    clear_weights(training.output_dir, arguments.overwrite)
    student.config.use_cache = True
    student.save_pretrained(training.output_dir)
    teacher.tokenizer.save_pretrained(training.output_dir)
    say(f"The student is in {training.output_dir}.")


if __name__ == "__main__":
    start("recall_training.py", train, RecallTrainingArguments, TrainingArguments)
