"""Fine-tune an encoder-decoder to summarize.

Summaries are scored by ROUGE.

    python recipes/finetune_summarization.py recipes/configs/summarization/scitldr_cpu.yaml [key=value ...]

From a checkpoint or from scratch. Writes results.json (ROUGE on validation and test text, next to the first sentences
of the source) and predictions.jsonl to `output_dir`.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _lib.checks import (
    check_columns,
    check_either,
    check_output,
    check_texts,
    check_vocabulary,
    clear_checkpoints,
    clear_weights,
)
from _lib.documents import documents_of_files, ending_texts, train_tokenizer
from _lib.entry import start
from _lib.runs import FineTuneArguments
from _lib.training import Trainer, load_to_train, say_figures, write_figures, write_lines

import numpy as np
from datasets import Dataset, load_dataset
from rouge_score.rouge_scorer import RougeScorer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from hf_hybrid_ssm.hub.configurations import new_config

ROUGE = ("rouge1", "rouge2", "rougeL")


class SummarizationTrainer(Trainer, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with this package's parameter groups."""


@dataclass
class SummarizationArguments(FineTuneArguments):
    """The model and the texts to summarize."""

    train_files: list[str] = field(default_factory=list)
    validation_files: list[str] = field(default_factory=list)
    test_files: list[str] = field(default_factory=list)
    dataset_name: str | None = field(default=None, metadata={"help": "a data set on the Hub instead of files"})
    dataset_config: str | None = None
    dataset_revision: str | None = field(default=None, metadata={"help": "a branch or commit of it"})
    train_split: str = "train"
    validation_split: str | None = "validation"
    test_split: str | None = "test"
    source_column: str = "document"
    target_column: str = "summary"
    references_column: str | None = field(
        default=None, metadata={"help": "several summaries of a text; the best one counts"}
    )
    tokenizer_vocab_size: int = 4096
    max_source_length: int = 1024
    max_target_length: int = 128
    max_eval_rows: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_either(self, "train_files", "dataset_name")


def load_splits(arguments: SummarizationArguments) -> dict[str, Dataset]:
    """`train`, and of `validation` and `test` those that the settings name."""
    splits = {}
    for name in ("train", "validation", "test"):
        files, split = getattr(arguments, f"{name}_files"), getattr(arguments, f"{name}_split")
        limit = arguments.max_train_rows if name == "train" else arguments.max_eval_rows
        if arguments.dataset_name is None and files:
            splits[name] = checked(documents_of_files(files), arguments, limit)
        elif arguments.dataset_name is not None and split is not None:
            given = {"revision": arguments.dataset_revision, "split": split}
            rows = load_dataset(arguments.dataset_name, arguments.dataset_config, **given)
            splits[name] = checked(rows, arguments, limit)
    return splits


def checked(rows: Dataset, arguments: SummarizationArguments, limit: int | None) -> Dataset:
    """The first `limit` rows, with the columns that the settings name."""
    wanted = [arguments.source_column, arguments.target_column, arguments.references_column]
    check_columns(rows, [column for column in wanted if column is not None], "the settings' columns")
    check_texts(rows, [arguments.source_column, arguments.target_column], "the settings' columns")
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def tokenized(rows: Dataset, arguments: SummarizationArguments, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """`input_ids` and `labels`, both cut to length and closed by the end-of-text token."""

    def encode(texts: list[str], length: int) -> list[list[int]]:
        ids = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=length - 1)["input_ids"]
        return [[*row, tokenizer.eos_token_id] for row in ids]

    def both(batch: dict[str, list]) -> dict[str, list]:
        return {
            "input_ids": encode(batch[arguments.source_column], arguments.max_source_length),
            "labels": encode(batch[arguments.target_column], arguments.max_target_length),
        }

    return rows.map(both, batched=True, remove_columns=rows.column_names)


def rouge(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    """Mean F1 in percent; with several references, the best one counts for each measure."""
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [scorer.score_multi(wanted, said) for wanted, said in zip(references, predictions, strict=True)]
    return {name: round(100 * float(np.mean([score[name].fmeasure for score in scores])), 2) for name in ROUGE}


def references_of(rows: Dataset, arguments: SummarizationArguments) -> list[list[str]]:
    if arguments.references_column is not None:
        return [list(several) for several in rows[arguments.references_column]]
    return [[one] for one in rows[arguments.target_column]]


def lead(text: str, sentences: int = 1) -> str:
    """The text's first sentences: what a summary must beat."""
    return " ".join(re.split(r"(?<=[.!?])\s+", text.strip())[:sentences])


def build(arguments: SummarizationArguments, rows: Dataset) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The encoder-decoder and its tokenizer; both know padding, end of text and the decoder's first token."""
    if arguments.model_name_or_path is not None:
        tokenizer = ending_texts(AutoTokenizer.from_pretrained(arguments.model_name_or_path))
        source = (AutoModelForSeq2SeqLM, arguments.model_name_or_path)
        model = load_to_train(*source, new_weights=arguments.from_scratch, **arguments.config)
        check_vocabulary(model, tokenizer)
        check_target(model, arguments)
        return model, tokenizer
    columns = (arguments.source_column, arguments.target_column)
    tokenizer = train_tokenizer((text for column in columns for text in rows[column]), arguments.tokenizer_vocab_size)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):  # generation must tell the end from padding
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    values = {"vocab_size": len(tokenizer), "decoder_start_token_id": tokenizer.pad_token_id} | special
    config = new_config(str(arguments.model_type), **values | arguments.config)
    model = AutoModelForSeq2SeqLM.from_config(config)
    check_target(model, arguments)
    return model, ending_texts(tokenizer)


def check_target(model: PreTrainedModel, arguments: SummarizationArguments) -> None:
    """
    Raises:
        ValueError: a summary may become longer than what the decoder has positions for.
    """
    positions = getattr(model.config, "max_target_positions", None)
    if positions is not None and positions < arguments.max_target_length:
        raise ValueError(
            f"max_target_length={arguments.max_target_length} is above the model's max_target_positions={positions}."
        )


def summaries(trainer: SummarizationTrainer, rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the model generates for tokenized rows."""
    ids = trainer.predictions(rows)
    ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def scored(
    trainer: SummarizationTrainer, rows: Dataset, arguments: SummarizationArguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """ROUGE of the model's and of the first sentences, and the predictions."""
    predictions, wanted = (
        summaries(trainer, tokenized(rows, arguments, tokenizer), tokenizer),
        references_of(rows, arguments),
    )
    first = [lead(text) for text in rows[arguments.source_column]]
    figures = {"rows": len(rows), "model": rouge(predictions, wanted), "first_sentence": rouge(first, wanted)}
    return figures, [{"summary": p, "references": w} for p, w in zip(predictions, wanted, strict=True)]


def summarize(arguments: SummarizationArguments, training: Seq2SeqTrainingArguments) -> dict[str, Any]:
    """Train, save, generate, measure."""
    check_output(training.output_dir, arguments.overwrite)
    arguments.check_checkpoint(AutoModelForSeq2SeqLM)
    set_seed(training.seed)
    with training.main_process_first(desc="data"):
        splits = load_splits(arguments)
        train = splits.pop("train")
        model, tokenizer = build(arguments, train)
        train = tokenized(train, arguments, tokenizer)
    training.predict_with_generate = True
    training.generation_max_length = training.generation_max_length or arguments.max_target_length
    trainer = SummarizationTrainer(
        model=model,
        args=training,
        train_dataset=train,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
    clear_checkpoints(training.output_dir, arguments.overwrite)
    run = trainer.train()
    clear_weights(training.output_dir, arguments.overwrite)
    trainer.save_model()
    results: dict[str, Any] = {
        "train_loss": round(run.training_loss, 4),
        "seconds": round(run.metrics["train_runtime"]),
    }
    said = []
    for split, rows in splits.items():
        results[split], lines = scored(trainer, rows, arguments, tokenizer)
        said += [{"split": split} | line for line in lines]
    write_figures(results, training.output_dir, arguments.results)
    write_lines(Path(training.output_dir) / "predictions.jsonl", said)
    say_figures(results)
    return results


if __name__ == "__main__":
    start(
        "finetune_summarization.py",
        summarize,
        SummarizationArguments,
        Seq2SeqTrainingArguments,
        then=("generate", "{model}", "A text to summarize."),
    )
