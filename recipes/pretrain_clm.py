"""Pre-train a causal language model.

One of this package, or any of transformers for comparison.

    python recipes/pretrain_clm.py recipes/configs/longhorn/books_cpu.yaml [key=value ...]
    accelerate launch recipes/pretrain_clm.py CONFIG.yaml    # many processes

Writes to `output_dir`: the model and tokenizer, checkpoints, results.json, history.json and loss.png.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from _lib.checks import check_vocabulary
from _lib.documents import DataArguments, begin_of, get_tokenizer, load_documents
from _lib.entry import start
from _lib.rows import packed_rows, split_rows
from _lib.runs import StartArguments, figures_of, parameters_of, seed_of_data, tokens_of, train_and_save, write_run
from _lib.segments import SegmentTrainer, check_lanes, collate, in_lanes
from _lib.training import LanguageTrainer, load_to_train, perplexity

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
)

from hf_hybrid_ssm.hub.configurations import new_config
from hf_hybrid_ssm.training.warm_start import copy_embeddings


@dataclass
class ModelArguments(StartArguments):
    """Which model to train, and from where."""

    carry_segments: bool = field(
        default=False, metadata={"help": "continue from the state of the previous segment, without gradient"}
    )


def build_model(
    arguments: StartArguments,
    tokenizer: PreTrainedTokenizerBase,
    auto_class: Any = AutoModelForCausalLM,
    special: dict[str, int | None] | None = None,
) -> PreTrainedModel:
    """A new model for the tokenizer, or the one to continue with.

    Args:
        special: the fields of its special tokens; by default those of a language model.

    Raises:
        ValueError: the vocabulary of the configuration is smaller than the tokenizer's.
    """
    if arguments.model_name_or_path is not None:
        model = load_to_train(auto_class, arguments.model_name_or_path)
    else:
        if special is None:
            special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            special["bos_token_id"] = begin_of(tokenizer)
        values = {"vocab_size": len(tokenizer)} | special | arguments.config
        model = auto_class.from_config(new_config(str(arguments.model_type), arguments.preset, **values))
    if arguments.embeddings_from is not None:
        copy_embeddings(model, arguments.embeddings_from)
    check_vocabulary(model, tokenizer)
    return model


def pretrain(
    model_arguments: ModelArguments,
    data: DataArguments,
    training: TrainingArguments,
    documents: tuple[Dataset, Dataset | None] | None = None,
) -> dict[str, Any]:
    """Train, evaluate and save; returns what is written to results.json.

    Args:
        documents: training and validation documents, instead of those that `data` names.
    """
    model_arguments.begin(training, AutoModelForCausalLM)
    with training.main_process_first(desc="data"):
        texts, validation_texts = documents or load_documents(data)
        tokenizer = get_tokenizer(data, texts, model_arguments.model_name_or_path)
        train = packed_rows(texts, tokenizer, data, seed_of_data(training))
        validation = None if validation_texts is None else packed_rows(validation_texts, tokenizer, data)
    train, validation = split_rows(train, validation, data)
    trainer_class, collator = LanguageTrainer, default_data_collator
    if model_arguments.carry_segments:
        check_lanes(train, training)
        train = in_lanes(train, training.train_batch_size)
        validation = in_lanes(validation, training.eval_batch_size)
        trainer_class, collator = SegmentTrainer, collate
        training.remove_unused_columns = False  # `begins` is for the trainer
    model = build_model(model_arguments, tokenizer)
    trainer = trainer_class(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=collator,
    )
    begin = time.process_time()
    run = train_and_save(trainer, model_arguments)
    validation_loss = trainer.evaluate()["eval_loss"]
    results = figures_of(trainer, run) | {
        "parameters_beside_embeddings": parameters_of(model, beside_embeddings=True),
        "tokens": tokens_of(trainer, data.sequence_length),
        "validation_loss": validation_loss,
        "validation_perplexity": perplexity(validation_loss),
        "cpu_seconds": time.process_time() - begin,
    }
    return write_run(trainer, results)


if __name__ == "__main__":
    start(
        "pretrain_clm.py",
        pretrain,
        ModelArguments,
        DataArguments,
        TrainingArguments,
        then=("generate", "{model}", "Once upon a time"),
    )
