"""Pre-train a causal language model.

One of this package, or any of transformers for comparison.

    python recipes/pretrain_clm.py recipes/configs/longhorn/books_cpu.yaml [key=value ...]
    accelerate launch recipes/pretrain_clm.py CONFIG.yaml    # many processes

Writes to `output_dir`: the model and tokenizer, checkpoints, results.json, history.json and loss.png.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _lib.checks import check_checkpoint, check_config, check_output, check_vocabulary, clear_checkpoints
from _lib.documents import DataArguments, begin_of, get_tokenizer, load_documents
from _lib.entry import start
from _lib.rows import packed_rows, split_rows
from _lib.segments import SegmentTrainer, check_lanes, collate, in_lanes
from _lib.training import (
    LanguageTrainer,
    checkpoint_to_resume,
    load_to_train,
    perplexity,
    plot_loss,
    say_figures,
    write_json,
)

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_hybrid_ssm.hub.configurations import new_config
from hf_hybrid_ssm.training.warm_start import copy_embeddings


@dataclass
class ModelArguments:
    """Which model to train, and from where."""

    model_type: str | None = field(default=None, metadata={"help": "longhorn, llama, mamba, ...: from scratch"})
    preset: str | None = field(default=None, metadata={"help": "a size of this package's families, such as 125m"})
    config: dict[str, Any] = field(default_factory=dict, metadata={"help": "fields of the configuration"})
    model_name_or_path: str | None = field(default=None, metadata={"help": "start from these weights instead"})
    embeddings_from: str | None = field(
        default=None, metadata={"help": "start with the token embeddings of this model, e.g. gpt2, of the same width"}
    )
    resume: str | None = field(
        default=None, metadata={"help": "a checkpoint folder, or auto for the newest complete one"}
    )
    carry_segments: bool = field(
        default=False, metadata={"help": "continue from the state of the previous segment, without gradient"}
    )
    overwrite: bool = field(default=False, metadata={"help": "start again in an output_dir that is not empty"})

    def __post_init__(self):
        if (self.model_type is None) == (self.model_name_or_path is None):
            raise ValueError(
                f"give either model_type or model_name_or_path, got model_type={self.model_type!r} and "
                f"model_name_or_path={self.model_name_or_path!r}."
            )
        check_config(self.model_type, self.config, self.preset)


def build_model(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, auto_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """A new model for the tokenizer, or the one to continue with.

    Raises:
        ValueError: the vocabulary of the configuration is smaller than the tokenizer's.
    """
    if arguments.model_name_or_path is not None:
        model = load_to_train(auto_class, arguments.model_name_or_path)
    else:
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
        values = {"vocab_size": len(tokenizer), "bos_token_id": begin_of(tokenizer)} | special | arguments.config
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
    check_output(training.output_dir, model_arguments.overwrite, model_arguments.resume)
    if model_arguments.model_name_or_path is not None:
        check_checkpoint(model_arguments.model_name_or_path, "model_name_or_path", AutoModelForCausalLM)
    set_seed(training.seed)
    seed = training.seed if training.data_seed is None else training.data_seed
    with training.main_process_first(desc="data"):
        texts, validation_texts = documents or load_documents(data)
        tokenizer = get_tokenizer(data, texts, model_arguments.model_name_or_path)
        train = packed_rows(texts, tokenizer, data, seed)
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
    model.config.use_cache = False  # no state is kept while training
    trainer = trainer_class(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=collator,
    )
    clear_checkpoints(training.output_dir, model_arguments.overwrite, model_arguments.resume)
    begin = time.process_time()
    run = trainer.train(resume_from_checkpoint=checkpoint_to_resume(model_arguments.resume, training.output_dir))
    model.config.use_cache = True
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # any process may load what the first one saves
    model.config.use_cache = False
    validation_loss = trainer.evaluate()["eval_loss"]
    tokens_per_step = data.sequence_length * training.train_batch_size * training.gradient_accumulation_steps
    tokens_per_step *= training.world_size
    results = {
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "parameters_beside_embeddings": model.num_parameters(exclude_embeddings=True),
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * tokens_per_step,
        "train_loss": run.metrics["train_loss"],
        "validation_loss": validation_loss,
        "validation_perplexity": perplexity(validation_loss),
        "seconds": run.metrics["train_runtime"],
        "cpu_seconds": time.process_time() - begin,
        "torch": torch.__version__,
    }
    if trainer.is_world_process_zero():
        folder = Path(training.output_dir)
        write_json(folder / "history.json", trainer.state.log_history)
        write_json(folder / "results.json", results)
        plot_loss(trainer.state.log_history, folder / "loss.png")
        say_figures(results)
    return results


if __name__ == "__main__":
    start(
        "pretrain_clm.py",
        pretrain,
        ModelArguments,
        DataArguments,
        TrainingArguments,
        then=("generate", "{model}", "Once upon a time"),
    )
