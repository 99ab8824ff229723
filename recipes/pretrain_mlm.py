"""Pre-train an encoder by masked language modelling.

SPADE's, BST's (bidirectional: true), or any of transformers.

    python recipes/pretrain_mlm.py recipes/configs/mlm/spade_books_cpu.yaml [key=value ...]

Writes to `output_dir`: the model and tokenizer, checkpoints, results.json, history.json and loss.png. The folder is a
start for any other head of the family, such as finetune_glue.py with `model_name_or_path=FOLDER`.
"""

from dataclasses import dataclass, field
from typing import Any

from _lib.documents import DataArguments, get_tokenizer, load_documents
from _lib.entry import start
from _lib.masking import NewMasksEachEpoch, TokenMasking
from _lib.rows import split_rows
from _lib.runs import StartArguments, figures_of, seed_of_data, tokens_of, train_and_save, write_run
from _lib.training import LanguageTrainer, perplexity

from pretrain_clm import build_model
from pretrain_seq2seq import token_rows
from transformers import AutoModelForMaskedLM, TrainingArguments


@dataclass
class MaskingArguments(StartArguments):
    """Which model to train, and how many of its tokens it must restore."""

    masked_fraction: float = field(default=0.15, metadata={"help": "share of the tokens to predict"})
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.masked_fraction < 1:
            raise ValueError(f"masked_fraction={self.masked_fraction} must lie between 0 and 1.")


def pretrain(arguments: MaskingArguments, data: DataArguments, training: TrainingArguments) -> dict[str, Any]:
    """Train, evaluate and save; returns what is written to results.json."""
    arguments.begin(training, AutoModelForMaskedLM)
    with training.main_process_first(desc="data"):
        texts, validation_texts = load_documents(data)
        tokenizer = get_tokenizer(data, texts, arguments.model_name_or_path)
        if data.tokenizer is None and arguments.model_name_or_path is None:
            tokenizer.add_special_tokens({"pad_token": "<|pad|>", "mask_token": "<|mask|>"})
        collator = TokenMasking(tokenizer, arguments.masked_fraction, training.seed)
        length = data.sequence_length
        train = token_rows(texts, tokenizer, data, length, seed_of_data(training))
        held_out = None if validation_texts is None else token_rows(validation_texts, tokenizer, data, length)
    model = build_model(arguments, tokenizer, AutoModelForMaskedLM)
    train, held_out = split_rows(train, held_out, data)
    training.remove_unused_columns = False  # the collator reads the row's number
    same_masks = TokenMasking(tokenizer, arguments.masked_fraction)
    trainer = LanguageTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=held_out.map(same_masks.corrupted),  # the same in every evaluation
        processing_class=tokenizer,
        data_collator=collator,
        callbacks=[NewMasksEachEpoch(collator)],
    )
    run = train_and_save(trainer, arguments)
    validation_loss = trainer.evaluate()["eval_loss"]
    results = figures_of(trainer, run) | {
        "tokens": tokens_of(trainer, length),
        "validation_loss": validation_loss,
        "validation_perplexity": perplexity(validation_loss),
    }
    return write_run(trainer, results, arguments.results)


if __name__ == "__main__":
    start(
        "pretrain_mlm.py",
        pretrain,
        MaskingArguments,
        DataArguments,
        TrainingArguments,
        then=("card", "{model}"),
    )
