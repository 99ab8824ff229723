"""Documents of the recall tasks, of chosen lengths in tokens: the `custom_dataset` of their task files.

What may be chosen stands in lm-eval's `metadata` (`--metadata '{"window": 256, "multiples": [1, 4]}'`), beside the
arguments of the model, which lm-eval adds.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from hf_hybrid_ssm.evaluation.recall_tasks.filler import sentences, sentences_of_file
from hf_hybrid_ssm.evaluation.recall_tasks.questions import QUESTIONS, Question

if TYPE_CHECKING:
    from datasets import Dataset

WINDOW = 256
MULTIPLES = (1, 2, 4, 8)
SAMPLES = 60
INTRODUCTION = "Read the text and remember what it says of people with names.\n\n"
TEMPLATE_ARGUMENTS = {"tokenize": False, "add_generation_prompt": True}


def documents_of(kind: str, **metadata: Any) -> "dict[str, Dataset]":
    """The test split of a task.

    Every document has at most `multiple` · `window` tokens with chat template, question and answer. From two windows
    on, each fact ends more than a window before the end of the question: what sees a window does not see it.

    Args:
        kind: of `QUESTIONS`.
        metadata: `window` (256 tokens), `multiples` (1, 2, 4, 8), `samples` of each (60), `seed` (0), `text_file`
            (sentences of a file instead of made ones); and of the model: `tokenizer` or `pretrained`, `gguf_file`,
            `max_length`.

    Raises:
        ValueError: no tokenizer is named, a length is too short for its facts, or longer than the model reads: lm-eval
            would cut the facts away, and the zero would say nothing.
    """
    from datasets import Dataset

    window, samples = (
        int(metadata.get(name, default)) for name, default in (("window", WINDOW), ("samples", SAMPLES))
    )
    multiples = _multiples(metadata.get("multiples", MULTIPLES))
    for name, value in (("window", window), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    tokenizer = _tokenizer(metadata)
    longest, readable = max(multiples) * window, _readable(metadata)
    if longest > readable:
        raise ValueError(
            f"{max(multiples)} windows of {window} are {longest} tokens, but the model reads {readable}: the text "
            "would be cut. Give fewer multiples, or max_length in model_args if it can read more."
        )
    rows = []
    for sample in range(samples):
        for multiple in multiples:
            draw = random.Random(f"{kind} {metadata.get('seed', 0)} {window} {multiple} {sample}")
            text_file = metadata.get("text_file")
            filler = sentences(draw) if text_file is None else sentences_of_file(text_file, draw)
            rows.append(document(QUESTIONS[kind](draw), filler, tokenizer, window, multiple, draw))
    return {"test": Dataset.from_list(rows)}


def document(
    question: Question,
    filler: Iterator[str],
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    multiple: int,
    draw: random.Random,
) -> dict[str, Any]:
    """`text`, `prefix`, `answer`, `multiple`, its `tokens`, and the least `distance` from a fact to the answer."""

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    ending = f"{question.prefix} {question.answer}"
    room = multiple * window - _template_tokens(tokenizer)
    room -= tokens(f"{INTRODUCTION}\n\n{question.question}{ending}") + sum(
        tokens(f" {fact}") for fact in question.facts
    )
    if room < 0:
        raise ValueError(
            f"window={window} times {multiple} is {-room} tokens too short for a question of {len(question.facts)} "
            "facts: give a longer window, or greater multiples."
        )
    between: list[str] = []
    lengths: list[int] = []
    while sum(lengths) < room:
        between.append(next(filler))
        lengths.append(tokens(f" {between[-1]}"))
    between, lengths = between[:-1], lengths[:-1]
    after = window + 1 - tokens(question.question) if multiple > 1 else 0
    last = len(between)
    while last and sum(lengths[last:]) < after:
        last -= 1
    places = sorted(draw.randint(0, last) for _ in question.facts)
    for count, (place, fact) in enumerate(zip(places, question.facts, strict=True)):
        between.insert(place + count, fact)
    text = f"{INTRODUCTION}{' '.join(between)}\n\n{question.question}"
    distance = tokens(text[text.rindex(question.facts[-1]) + len(question.facts[-1]) :])
    return {
        "text": text,
        "prefix": question.prefix,
        "answer": question.answer,
        "multiple": multiple,
        "tokens": tokens(f"{text} {ending}") + _template_tokens(tokenizer),
        "distance": distance,
    }


def score(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Whether the answer is what the model would write, in all and at this many windows."""
    _, is_greedy = results[0]
    return {"acc": float(is_greedy), f"acc_{doc['multiple']}x": float(is_greedy)}


def _multiples(value: Any) -> list[int]:
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else str(value).split(",")
    numbers = [int(each) for each in several]
    if not numbers or min(numbers) < 1:
        raise ValueError(f"multiples={value!r} must be numbers of windows, 1 or more.")
    return numbers


def _tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    tokenizer = metadata.get("tokenizer") or metadata.get("pretrained")
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if not isinstance(tokenizer, str):
        raise ValueError('recall tasks count tokens: name a tokenizer, --metadata \'{"tokenizer": "FOLDER"}\'.')
    return _load_tokenizer(tokenizer, metadata.get("gguf_file") or None)


@cache
def _load_tokenizer(place: str, gguf_file: str | None) -> PreTrainedTokenizerBase:
    """Once for all tasks: to read that of a GGUF file takes long."""
    return AutoTokenizer.from_pretrained(place, **({"gguf_file": gguf_file} if gguf_file else {}))


def _readable(metadata: Mapping[str, Any]) -> int:
    """The tokens that lm-eval's model will read; it cuts longer texts."""
    from lm_eval.models.utils import resolve_max_length

    if metadata.get("max_length"):
        return int(metadata["max_length"])
    if isinstance(metadata.get("pretrained"), str):
        config = AutoConfig.from_pretrained(metadata["pretrained"], gguf_file=metadata.get("gguf_file") or None)
        return resolve_max_length(config)
    raise ValueError("recall tasks are never cut: name the model as pretrained in model_args, or give max_length.")


def _template_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """What a chat template adds to a message, whether or not it will be used."""
    if not getattr(tokenizer, "chat_template", None):
        return 1  # a begin token
    text = tokenizer.apply_chat_template([{"role": "user", "content": ""}], **TEMPLATE_ARGUMENTS)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


needle = partial(documents_of, "needle")
several = partial(documents_of, "several")
distractors = partial(documents_of, "distractors")
variables = partial(documents_of, "variables")
pairs = partial(documents_of, "pairs")
