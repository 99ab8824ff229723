"""Pre-train an encoder-decoder by span corruption.

SPADE's, or any of transformers for comparison; T5's span corruption.

    python recipes/pretrain_seq2seq.py recipes/configs/seq2seq/books_cpu.yaml [key=value ...]

Writes to `output_dir`: the model and tokenizer, checkpoints, results.json, history.json and loss.png. The folder can
be summarized with (finetune_summarization.py) and its encoder classified with (finetune_glue.py), both by
`model_name_or_path=FOLDER`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from _lib.documents import DataArguments, ending_texts, get_tokenizer, load_documents
from _lib.entry import start
from _lib.masking import NewMasksEachEpoch, SpanCorruption, sentinels_of, text_length
from _lib.rows import RowStream, cut_rows, split_rows
from _lib.runs import StartArguments, figures_of, seed_of_data, tokens_of, train_and_save, write_run
from _lib.training import LanguageTrainer, perplexity

import pretrain_clm
from datasets import Dataset, IterableDataset
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

SHORTEST_ROW = 8  # tokens; what is left at the end of all documents may be shorter, and is dropped


@dataclass
class SpanArguments(StartArguments):
    """Which model to train, and how much of the text it must restore. `sequence_length` is that of the input."""

    noise_density: float = 0.15
    mean_span_length: float = 3.0
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.noise_density < 1:
            raise ValueError(f"noise_density={self.noise_density} must lie between 0 and 1.")
        if self.mean_span_length < 1:
            raise ValueError(f"mean_span_length={self.mean_span_length} must be at least 1.")


def with_sentinels(tokenizer: PreTrainedTokenizerBase, trained_here: bool) -> PreTrainedTokenizerBase:
    """A tokenizer trained here gets a padding token and 100 sentinels; one that was given keeps its own. Both end a
    text with the end-of-text token."""
    if trained_here:
        names = [f"<extra_id_{number}>" for number in range(100)]
        tokenizer.add_special_tokens({"pad_token": "<|pad|>", "additional_special_tokens": names})
    if tokenizer.pad_token_id is None or not sentinels_of(tokenizer):
        raise ValueError("the tokenizer needs a padding token and the sentinels <extra_id_0>, <extra_id_1>, ...")
    return ending_texts(tokenizer)


def chunks(documents: Iterable[list[int]], length: int, end: int) -> Iterator[dict[str, list[int]]]:
    """`input_ids` of `length` tokens of concatenated documents; a last row below SHORTEST_ROW is dropped."""
    held: list[int] = []
    for document in documents:
        held += [*document, end]
        full = len(held) // length * length
        yield from ({"input_ids": held[start : start + length]} for start in range(0, full, length))
        held = held[full:]
    if len(held) >= SHORTEST_ROW:
        yield {"input_ids": held}


def token_rows(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    length: int,
    seed: int | None = None,
) -> Dataset | RowStream:
    """The rows of `chunks`, with their number in the column `row`."""
    rows = cut_rows(documents, tokenizer, data, partial(chunks, length=length, end=tokenizer.eos_token_id), seed)
    return rows.add_column("row", list(range(len(rows)))) if isinstance(rows, Dataset) else rows


def with_other_inputs(rows: Dataset) -> Dataset:
    """Each target with the input of the next row: a loss that hardly differs tells that the decoder does not read its
    encoder, as long as it has not learned to, or when all the encoder's outputs have become the same."""
    inputs = rows["input_ids"][1:] + rows["input_ids"][:1]
    return rows.remove_columns("input_ids").add_column("input_ids", inputs)


def build_model(arguments: SpanArguments, tokenizer: PreTrainedTokenizerBase, target_length: int) -> PreTrainedModel:
    """A new model for the tokenizer, or the one to continue with.

    Raises:
        ValueError: it has too few tokens or target positions.
    """
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    special["decoder_start_token_id"] = tokenizer.pad_token_id
    model = pretrain_clm.build_model(arguments, tokenizer, AutoModelForSeq2SeqLM, special)
    if (positions := getattr(model.config, "max_target_positions", target_length)) < target_length:
        raise ValueError(f"max_target_positions={positions} is below the target's {target_length} tokens.")
    return model


def pretrain(arguments: SpanArguments, data: DataArguments, training: TrainingArguments) -> dict[str, Any]:
    """Train, evaluate and save; returns what is written to results.json."""
    arguments.begin(training, AutoModelForSeq2SeqLM)
    noise = (arguments.noise_density, arguments.mean_span_length)
    length, target_length = text_length(data.sequence_length, *noise)
    with training.main_process_first(desc="data"):
        texts, validation_texts = load_documents(data)
        is_new = data.tokenizer is None and arguments.model_name_or_path is None
        tokenizer = with_sentinels(get_tokenizer(data, texts, arguments.model_name_or_path), is_new)
        train = token_rows(texts, tokenizer, data, length, seed_of_data(training))
        held_out = None if validation_texts is None else token_rows(validation_texts, tokenizer, data, length)
    model = build_model(arguments, tokenizer, target_length)
    train, held_out = split_rows(train, held_out, data)
    if isinstance(held_out, RowStream):  # read several times, and each target with the input of the next row
        held_out = Dataset.from_list(list(held_out))
    collator = SpanCorruption(tokenizer, length, *noise, seed=training.seed)
    training.remove_unused_columns = False  # the collator reads the row's number
    trainer = LanguageTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=held_out.map(SpanCorruption(tokenizer, length, *noise).corrupted),  # the same in every evaluation
        processing_class=tokenizer,
        data_collator=collator,
        callbacks=[NewMasksEachEpoch(collator)],
    )
    run = train_and_save(trainer, arguments)
    validation_loss = trainer.evaluate()["eval_loss"]
    others = trainer.evaluate(with_other_inputs(trainer.eval_dataset), metric_key_prefix="eval_others")
    results = figures_of(trainer, run) | {
        "text_tokens": tokens_of(trainer, length),
        "lengths": {"text": length, "input": data.sequence_length, "target": target_length},
        "validation_loss": validation_loss,
        "validation_perplexity": perplexity(validation_loss),
        "validation_loss_with_other_inputs": others["eval_others_loss"],
    }
    return write_run(trainer, results, arguments.results)


if __name__ == "__main__":
    start(
        "pretrain_seq2seq.py",
        pretrain,
        SpanArguments,
        DataArguments,
        TrainingArguments,
        then=("generate", "{model}", "Once upon a <extra_id_0> there was"),
    )
