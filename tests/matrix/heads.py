"""Tasks beside plain language modelling: transformers' heads through the Auto classes, and TRL's trainer."""

import tempfile

import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.matrix.columns import Column, Group
from tests.matrix.rows import batch_of, model_of
from tests.memory import in_own_memory


def _head(row: str, auto_class: type, targets: dict[str, torch.Tensor]) -> None:
    """The head takes a language model's checkpoint, learns, and comes back from disk."""
    with tempfile.TemporaryDirectory() as folder:
        model_of(row).save_pretrained(folder)
        model = auto_class.from_pretrained(folder, num_labels=3)  # type: ignore[attr-defined]
    inputs = {"input_ids": batch_of(row)["input_ids"], **targets}
    with torch.no_grad():
        before = model.eval()(**inputs).loss.item()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(10):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = model.eval()(**inputs).loss
    assert after < 0.8 * before, f"the loss did not fall: {before:.3f} to {after:.3f}"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = in_own_memory(auto_class.from_pretrained(folder).eval())  # type: ignore[attr-defined]
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).loss, after), "the loaded model has another loss"


def sequence_classification(row: str) -> None:
    _head(row, AutoModelForSequenceClassification, {"labels": torch.tensor([0, 2])})


def token_classification(row: str) -> None:
    _head(row, AutoModelForTokenClassification, {"labels": batch_of(row)["input_ids"] % 3})


def question_answering(row: str) -> None:
    spans = {"start_positions": torch.tensor([1, 5]), "end_positions": torch.tensor([4, 9])}
    _head(row, AutoModelForQuestionAnswering, spans)


def trl_fine_tuning(row: str) -> None:
    """Token ids of two lengths, padded by TRL's collator."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.matrix.word_tokenizer import words_tokenizer

    model = model_of(row)
    rows = [ids[:length].tolist() for ids in batch_of(row)["input_ids"] for length in (9, 14)]
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            max_steps=12,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            per_device_train_batch_size=4,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
            bf16=False,
        )
        trainer = SFTTrainer(
            model=model,
            args=settings,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=words_tokenizer(model.config.vocab_size),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0], f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}"


GROUP = Group(
    "Heads and TRL",
    "The Auto class starts from the language model's checkpoint (of SPADE, whose heads are bidirectional, from its "
    "embeddings), ten steps lower the loss by a fifth, and the saved model has the same loss when loaded. TRL: twelve "
    "steps of `SFTTrainer` on rows of two lengths lower the loss by a fifth.",
    (
        Column("sequence classification", sequence_classification, "transformers"),
        Column("token classification", token_classification, "transformers"),
        Column("question answering", question_answering, "transformers"),
        Column("TRL: SFTTrainer", trl_fine_tuning, "trl", ("datasets",)),
    ),
)
