"""What other libraries cannot do yet, by the error they say it with: the reason behind a cell that is not "yes".

An error that none of these explains is ours until shown otherwise, and `report.py` ends with an error then.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """One limit.

    Args:
        library: the distribution that has it.
        column: regular expression found in the name of the column.
        error: regular expression found in the error's line.
        reason: what the library cannot do, and what to do instead.
    """

    library: str
    column: str
    error: str
    reason: str


LIMITS = (
    Limit(
        "bitsandbytes",
        "nf4",
        r"shape '\[\d+, 0\]' is invalid",
        "its four-bit kernel for CPUs wants inputs of at least 64 features; Longhorn's `dt_proj` has a sixteenth of "
        'the hidden size. `llm_int8_skip_modules=["lm_head", "dt_proj"]` leaves that map alone.',
    ),
    Limit(
        "torch",
        "torch dynamic int8",
        "the cache changes the generated tokens",
        "it rounds activations by the largest value of the whole tensor, so that a token's result depends on what is "
        "computed along with it, whatever the model.",
    ),
    Limit(
        "torch",
        "export: prefill of any length",
        r"Guard failed: ids_\d\.size|specialized it to be a constant",
        "an exported graph holds for lengths that take the same branches, and these layers choose block and transform "
        "sizes by the length. Export a graph for each length in use, or decode by the graph of one token.",
    ),
    Limit(
        "torch",
        "export: prefill of any length",
        "wrap_with_autocast is missing val field",
        "with a free length its exporter loses what it knows of a region where autocast is switched off, as the "
        "Legendre memory does to stay in float32. Export a graph for each length in use.",
    ),
    Limit(
        "torch",
        "ONNX",
        "No decompositions registered for the complex-valued input",
        "its ONNX exporter lacks some operations on complex numbers, which the kernels of S4 and S4D are made of.",
    ),
    Limit(
        "trl",
        "SFTTrainer",
        "exactly one of decoder_input_ids or decoder_inputs_embeds",
        "SFTTrainer is for decoder-only models: it takes the labels away, which an encoder-decoder makes its inputs "
        "from. transformers' Seq2SeqTrainer trains it (`recipes/finetune_summarization.py`).",
    ),
)


def limit_behind(column: str, error: str) -> Limit | None:
    """The limit that explains an error of a column; None where nothing does."""
    found = (limit for limit in LIMITS if re.search(limit.column, column) and re.search(limit.error, error))
    return next(found, None)
