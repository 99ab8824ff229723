"""Pre-train and score a language model of words.

It reads one continuous stream, with fairseq's protocol for WikiText-103.

    python recipes/word_lm.py recipes/configs/spade/wikitext103.yaml [key=value ...]

Blocks of `sequence_length` words ignore where lines and articles end; the state starts from zero in each. Validation
and test are scored with `context` words before every block but the first, each word once; perplexity is per word (a
line's end counts as one, unknown words as `<unk>`). Writes to `output_dir`: model and tokenizer, checkpoints,
results.json, history.json and loss.png.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from _lib.checks import check_either
from _lib.documents import paths_of
from _lib.entry import start
from _lib.runs import figures_of, train_and_save, write_run
from _lib.training import Trainer, perplexity

import numpy as np
import torch
import transformers
from datasets import load_dataset
from pretrain_clm import ModelArguments, build_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    PreTrainedTokenizerFast,
    TrainingArguments,
    default_data_collator,
)

SPLITS = ("train", "validation", "test")


SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # in fairseq's order


def word_tokenizer(lines: Iterable[str]) -> PreTrainedTokenizerFast:
    """Every word between spaces is a token; the ids are those of a dictionary that fairseq makes of the same lines.

    Four special tokens, then the words by falling frequency, equally frequent ones in alphabetical order, filled up to
    a multiple of 8.
    """
    counts = Counter(word for line in lines for word in line.split())
    words = sorted(counts.keys() - set(SPECIAL.values()), key=lambda word: (-counts[word], word))
    words = [*SPECIAL.values(), *words]
    words += [f"madeupword{number:04}" for number in range(-len(words) % 8)]
    level = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL["unk_token"])
    tokenizer = Tokenizer(level)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL)


def stream_of(lines: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """The ids of all lines one after the other; every line ends with the end token, an empty one is nothing else.

    A word is looked up whole: unlike the tokenizer's own call, a special token inside of a word stays a part of it.
    """
    numbers, end, unknown = tokenizer.get_vocab(), tokenizer.eos_token_id, tokenizer.unk_token_id
    stream = array("i")
    for line in lines:
        stream.extend(numbers.get(word, unknown) for word in line.split())
        stream.append(end)
    return np.frombuffer(stream, dtype=np.int32) if stream else np.zeros(0, dtype=np.int32)


class Blocks(torch.utils.data.Dataset):
    """A stream in blocks of `length` targets, the first `context` of which are read and not scored.

    Every token is scored exactly once. Row i scores the targets from i (length - context) on; before them it reads up
    to `context` tokens more, and one: the input of its first target, which is the end token at the stream's start. So
    rows have `length` + 1 tokens, and their labels, which models shift, are -100 where nothing is scored. Short rows
    are filled up with the end token.
    """

    def __init__(self, stream: np.ndarray, length: int, end: int, context: int = 0):
        if not 0 <= context < length:
            raise ValueError(f"context={context} must lie between 0 and length - 1 = {length - 1}.")
        if not len(stream):
            raise ValueError("the stream has no token.")
        self.stream, self.length, self.end, self.context = stream, length, end, context

    def __len__(self) -> int:
        return -(-len(self.stream) // (self.length - self.context))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}.")
        first = index * (self.length - self.context)  # the first scored target
        start, stop = max(0, first - self.context), min(first + self.length - self.context, len(self.stream))
        before = self.end if start == 0 else int(self.stream[start - 1])
        ids = torch.full((self.length + 1,), self.end)
        labels = torch.full((self.length + 1,), -100)
        ids[0] = before
        ids[1 : 1 + stop - start] = torch.from_numpy(self.stream[start:stop].astype(np.int64))
        scored = slice(1 + first - start, 1 + stop - start)
        labels[scored] = ids[scored]
        return {"input_ids": ids, "labels": labels}


@dataclass
class WordArguments:
    """Lines of words, already tokenised, and how they are cut."""

    dataset_name: str | None = field(default=None, metadata={"help": "on the Hub, one line a row"})
    dataset_config: str | None = None
    text_column: str = "text"
    train_files: list[str] = field(
        default_factory=list, metadata={"help": "or text files of lines: wiki.train.tokens"}
    )
    validation_files: list[str] = field(default_factory=list)
    test_files: list[str] = field(default_factory=list)
    sequence_length: int = field(default=3072, metadata={"help": "words of a block"})
    context: int = field(default=400, metadata={"help": "words of a block that evaluation reads without scoring them"})
    momentum: float = field(default=0.99, metadata={"help": "Nesterov's, with optim=sgd"})
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})

    def __post_init__(self):
        check_either(self, "train_files", "dataset_name")
        if not 0 <= self.context < self.sequence_length:
            raise ValueError(f"context={self.context} must lie below sequence_length={self.sequence_length}.")
        if not 0 < self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} must lie between 0 and 1.")


def lines_of(words: WordArguments, split: str) -> Iterable[str]:
    """The lines of a split; a file's last line break begins no further line."""
    if words.dataset_name is not None:
        yield from load_dataset(words.dataset_name, words.dataset_config, split=split)[words.text_column]
        return
    for path in paths_of(getattr(words, f"{split}_files")):
        with open(path, encoding="utf-8", newline="\n") as lines:
            yield from lines


class WordTrainer(Trainer):
    """`Trainer` with the source's optimizer (`optim=sgd`: Nesterov momentum) and exact evaluation, word by word."""

    momentum: float = 0.99

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                group |= {"momentum": self.momentum, "nesterov": True}
        return optimizer

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The row's summed loss and number of words, in place of logits."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = model(**inputs, use_cache=False).loss.detach().float()
        count = (inputs["labels"] != -100).sum()
        return loss, torch.stack([loss * count, count.float()])[None], count[None]


def per_word(prediction: EvalPrediction) -> dict[str, float]:
    """Loss and perplexity of all words, from the sums of the rows."""
    total, words = np.asarray(prediction.predictions, dtype=np.float64).sum(0)
    return {"loss_per_word": total / words, "perplexity": perplexity(total / words), "words": int(words)}


def word_lm(arguments: ModelArguments, words: WordArguments, training: TrainingArguments) -> dict[str, Any]:
    """Train, score and save; returns what is written to results.json."""
    if arguments.carry_segments:
        raise ValueError("carry_segments=True: blocks do not carry their state here; use pretrain_clm.py.")
    arguments.begin(training, AutoModelForCausalLM)
    training.per_device_eval_batch_size = 1  # a row's mean times its words is its sum
    tokenizer = word_tokenizer(lines_of(words, "train"))
    streams = {split: stream_of(lines_of(words, split), tokenizer) for split in SPLITS}
    rows = {
        split: Blocks(stream, words.sequence_length, tokenizer.eos_token_id, 0 if split == "train" else words.context)
        for split, stream in streams.items()
    }
    model = build_model(arguments, tokenizer)
    trainer = WordTrainer(
        model=model,
        args=training,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=per_word,
    )
    trainer.momentum = words.momentum
    run = train_and_save(trainer, arguments)
    results = figures_of(trainer, run) | {
        "vocabulary": len(tokenizer),
        "words": {split: len(stream) for split, stream in streams.items()},
        "transformers": transformers.__version__,
    }
    for split in ("validation", "test"):
        found = trainer.evaluate(rows[split], metric_key_prefix=split)
        results[split] = {name: found[f"{split}_{name}"] for name in ("loss_per_word", "perplexity", "words")}
    return write_run(trainer, results, words.results)


if __name__ == "__main__":
    start("word_lm.py", word_lm, ModelArguments, WordArguments, TrainingArguments, then=("check", "{model}"))
