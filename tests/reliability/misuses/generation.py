"""`generate()` with settings or inputs that cannot be meant."""

from collections.abc import Callable
from pathlib import Path

import torch

from tests.reliability.misuses import Misuse
from tests.reliability.misuses.inputs import IDS, encoder_decoder, filled, mask, model


def _generate(**settings) -> Callable[[Path], object]:
    given = {"inputs": IDS, "max_new_tokens": 2, "do_sample": False, **settings}
    return lambda folder: model().generate(**given)


SETTINGS: list[tuple[str, Callable[[Path], object], type[Exception], str]] = [
    ("no new token", _generate(max_new_tokens=0), ValueError, "`max_new_tokens` must be greater than 0, but is 0"),
    ("a length shorter than the prompt", _generate(max_new_tokens=None, max_length=2), ValueError, "`max_length`.* 2"),
    ("three greedy answers", _generate(num_return_sequences=3), ValueError, "`num_return_sequences`.*got 3"),
    ("a temperature of 0", _generate(do_sample=True, temperature=0.0), ValueError, r"`temperature` \(=0.0\)"),
    ("a negative temperature", _generate(do_sample=True, temperature=-1.0), ValueError, r"`temperature` \(=-1.0\)"),
    ("a negative top_k", _generate(do_sample=True, top_k=-1), ValueError, "`top_k`.*-1"),
    ("a negative repetition penalty", _generate(repetition_penalty=-1.0), ValueError, "strictly positive.*-1.0"),
    ("a setting that does not exist", _generate(temprature=2), ValueError, r"not used by the model: \['temprature'\]"),
    ("a cache that does not exist", _generate(cache_implementation="ring"), ValueError, r"\(ring\). Choose one of"),
    ("no bad words", _generate(bad_words_ids=[]), ValueError, "`bad_words_ids` has to be a non-empty list"),
    ("stop strings without tokenizer", _generate(stop_strings="end"), ValueError, "stop strings.*tokenizer"),
    ("ids beyond the vocabulary", _generate(inputs=IDS + 50), ValueError, "input_ids has ids from 53 to 64"),
    ("ids of floats", _generate(inputs=IDS.float()), TypeError, "input_ids must be int32 or int64"),
    (
        "a mask shorter than the prompt",
        _generate(attention_mask=mask(2, 4).tril(1)),
        ValueError,
        r"attention_mask .*got \(2, 4\)",
    ),
    (
        "a mask longer than the prompt",
        _generate(attention_mask=mask(2, 9).tril(7)),
        ValueError,
        r"attention_mask .*got \(2, 9\)",
    ),
    (
        "an additive mask",
        _generate(attention_mask=torch.full((2, 6), -1e9)),
        ValueError,
        "attention_mask must be 1 for text.*additive",
    ),
    ("a tuple as cache", _generate(past_key_values=()), ValueError, "tuple of `past_key_values`.*`Cache`"),
    (
        "a cache that has seen all of the prompt",
        lambda folder: model().generate(IDS[:, :3], past_key_values=filled(), max_new_tokens=2, do_sample=False),
        ValueError,
        "input_ids must have shape",
    ),
    (
        "a cache of other rows",
        lambda folder: model().generate(
            IDS[:1].repeat(1, 2), past_key_values=filled(), max_new_tokens=2, do_sample=False
        ),
        ValueError,
        "past_key_values holds a batch of 2",
    ),
    (
        "a target longer than the learned positions",
        lambda folder: encoder_decoder().generate(IDS, max_new_tokens=99, min_new_tokens=99, do_sample=False),
        ValueError,
        "65 tokens, but max_target_positions=64",
    ),
    (
        "a base model",
        lambda folder: model("longhorn", "LonghornModel").generate(IDS),
        AttributeError,
        "'LonghornModel' object has no attribute 'generate'",
    ),
]
MISUSES = [Misuse("generate", done, provoke, (error,), words) for done, provoke, error, words in SETTINGS]
