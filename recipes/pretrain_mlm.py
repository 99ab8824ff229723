"""Pre-train an encoder by masked language modelling.

SPADE's, BST's (bidirectional: true), or any of transformers.

    python recipes/pretrain_mlm.py recipes/configs/mlm/spade_books_cpu.yaml [key=value ...]

Writes to `output_dir`: the model and tokenizer, checkpoints, results.json, history.json and loss.png. The folder is a
start for any other head of the family, such as finetune_glue.py with `model_name_or_path=FOLDER`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _lib.checks import check_checkpoint, check_config, check_output, clear_checkpoints
from _lib.documents import DataArguments, get_tokenizer, load_documents
from _lib.entry import start
from _lib.rows import split_rows
from _lib.span_corruption import NewMasksEachEpoch
from _lib.token_masking import TokenMasking
from _lib.training import (
    LanguageTrainer,
    checkpoint_to_resume,
    perplexity,
    plot_loss,
    say_figures,
    write_figures,
    write_json,
)

import torch
from pretrain_clm import build_model
from pretrain_seq2seq import token_rows
from transformers import AutoModelForMaskedLM, TrainingArguments, set_seed


@dataclass
class MaskingArguments:
    """Which model to train, and how many of its tokens it must restore."""

    model_type: str | None = field(default=None, metadata={"help": "spade, bst, bert, ...: from scratch"})
    preset: str | None = field(default=None, metadata={"help": "a size of this package's families"})
    config: dict[str, Any] = field(default_factory=dict, metadata={"help": "fields of the configuration"})
    model_name_or_path: str | None = field(default=None, metadata={"help": "start from these weights instead"})
    embeddings_from: str | None = field(default=None, metadata={"help": "start with this model's token embeddings"})
    masked_fraction: float = field(default=0.15, metadata={"help": "share of the tokens to predict"})
    resume: str | None = field(default=None, metadata={"help": "a checkpoint folder, or auto for the newest"})
    overwrite: bool = field(default=False, metadata={"help": "start again in an output_dir that is not empty"})
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})

    def __post_init__(self):
        if (self.model_type is None) == (self.model_name_or_path is None):
            raise ValueError(
                f"give either model_type or model_name_or_path, got model_type={self.model_type!r} and "
                f"model_name_or_path={self.model_name_or_path!r}."
            )
        check_config(self.model_type, self.config, self.preset)
        if not 0 < self.masked_fraction < 1:
            raise ValueError(f"masked_fraction={self.masked_fraction} must lie between 0 and 1.")


def pretrain(arguments: MaskingArguments, data: DataArguments, training: TrainingArguments) -> dict[str, Any]:
    """Train, evaluate and save; returns what is written to results.json."""
    check_output(training.output_dir, arguments.overwrite, arguments.resume)
    if arguments.model_name_or_path is not None:
        check_checkpoint(arguments.model_name_or_path, "model_name_or_path", AutoModelForMaskedLM)
    set_seed(training.seed)
    seed = training.seed if training.data_seed is None else training.data_seed
    with training.main_process_first(desc="data"):
        texts, validation_texts = load_documents(data)
        tokenizer = get_tokenizer(data, texts, arguments.model_name_or_path)
        if data.tokenizer is None and arguments.model_name_or_path is None:
            tokenizer.add_special_tokens({"pad_token": "<|pad|>", "mask_token": "<|mask|>"})
        collator = TokenMasking(tokenizer, arguments.masked_fraction, training.seed)
        length = data.sequence_length
        train = token_rows(texts, tokenizer, data, length, seed)
        held_out = None if validation_texts is None else token_rows(validation_texts, tokenizer, data, length)
    model = build_model(arguments, tokenizer, AutoModelForMaskedLM)  # type: ignore[arg-type]
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
    clear_checkpoints(training.output_dir, arguments.overwrite, arguments.resume)
    run = trainer.train(resume_from_checkpoint=checkpoint_to_resume(arguments.resume, training.output_dir))
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # any process may load what the first one saves
    validation_loss = trainer.evaluate()["eval_loss"]
    rows_per_step = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    results = {
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * rows_per_step * length,
        "train_loss": run.metrics["train_loss"],
        "validation_loss": validation_loss,
        "validation_perplexity": perplexity(validation_loss),
        "seconds": run.metrics["train_runtime"],
        "torch": torch.__version__,
    }
    if trainer.is_world_process_zero():
        write_json(Path(training.output_dir) / "history.json", trainer.state.log_history)
        write_figures(results, training.output_dir, arguments.results)
        plot_loss(trainer.state.log_history, Path(training.output_dir) / "loss.png")
        say_figures(results)
    return results


if __name__ == "__main__":
    start(
        "pretrain_mlm.py",
        pretrain,
        MaskingArguments,
        DataArguments,
        TrainingArguments,
        then=("card", "{model}"),
    )
