"""What is measured of a checkpoint before it is shared: losses of held-out text and golden values, by objective."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from _lib.documents import begin_of, token_ids
from _lib.scoring import scored_documents, sliding_loss
from _lib.span_corruption import MaskingCollator, SpanCorruption, text_length
from _lib.token_masking import TokenMasking
from _lib.training import perplexity

import torch
import torch.nn.functional as F
from pretrain_seq2seq import chunks
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

EVERY = 64  # of the vocabulary's logits that golden.json keeps
MEAN_SPAN = 3.0
NEW_TOKENS = 32  # of a language model's golden text
ROWS = 16  # of corrupted text that are scored at a time


class CausalObjective:
    """Every token given those before it, in windows that overlap by half."""

    recipe, auto_class = "pretrain_clm.py", AutoModelForCausalLM

    def figures(self, model: PreTrainedModel, tokenizer: Any, texts: list[str], length: int, limit: int) -> dict:
        documents, num_bytes = scored_documents(texts, tokenizer, limit)
        tokens = sum(len(document) - 1 for document in documents)
        loss = sliding_loss(model, documents, length, length // 2)
        return losses(loss) | {"bits_per_byte": loss * tokens / num_bytes / math.log(2)}

    def golden(self, model: PreTrainedModel, tokenizer: Any, prompt: str) -> dict[str, Any]:
        """Greedy text after the prompt, and logits after its last token."""
        ids = torch.tensor([[begin_of(tokenizer), *token_ids([prompt], tokenizer)[0]]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        return known(prompt, ids, tokenizer.decode(output[0, ids.shape[1] :]), model(ids).logits[0, -1])


class CorruptedText:
    """Rows of text of which a collator hides a share."""

    def __init__(self, noise: float = 0.15):
        self.noise = noise

    def collator(self, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[MaskingCollator, int]:
        """It, and the tokens of a row before it is corrupted."""
        raise NotImplementedError

    @torch.inference_mode()
    def figures(self, model: PreTrainedModel, tokenizer: Any, texts: list[str], length: int, limit: int) -> dict:
        """Of the hidden tokens (with their sentinels, where there are some); the same tokens are hidden every time."""
        collator, length = self.collator(tokenizer, length)
        cut = chunks(token_ids(texts, tokenizer), length, tokenizer.eos_token_id)
        rows = [row | {"row": number} for number, row in enumerate(itertools.islice(cut, max(1, limit // length)))]
        total, count = 0.0, 0
        for first in range(0, len(rows), ROWS):
            batch = collator(rows[first : first + ROWS])
            logits, labels = model(**batch).logits, batch["labels"]
            total += F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum").item()
            count += int((labels != -100).sum())
        return losses(total / count)


class MaskedObjective(CorruptedText):
    recipe, auto_class = "pretrain_mlm.py", AutoModelForMaskedLM

    def collator(self, tokenizer, length):
        return TokenMasking(tokenizer, self.noise), length

    def golden(self, model: PreTrainedModel, tokenizer: Any, prompt: str) -> dict[str, Any]:
        """What is likeliest in the place of the prompt's last word, and its logits."""
        text = f"{prompt.rsplit(' ', 1)[0]}{tokenizer.mask_token} the door."
        ids = torch.tensor(token_ids([text], tokenizer))
        logits = model(ids).logits[ids == tokenizer.mask_token_id][0]
        return known(text, ids, tokenizer.decode([logits.argmax()]), logits)


class SpanObjective(CorruptedText):
    recipe, auto_class = "pretrain_seq2seq.py", AutoModelForSeq2SeqLM

    def collator(self, tokenizer, length):
        noise = (self.noise, MEAN_SPAN)
        length, _ = text_length(length, *noise)
        return SpanCorruption(tokenizer, length, *noise), length

    def golden(self, model: PreTrainedModel, tokenizer: Any, prompt: str) -> dict[str, Any]:
        """The likeliest spans for what is hidden of the prompt, and the logits of the first token."""
        ids = token_ids([prompt], tokenizer)[0]
        batch = SpanCorruption(tokenizer, len(ids), self.noise, MEAN_SPAN)([{"input_ids": ids, "row": 0}])
        inputs = batch["input_ids"]
        output = model.generate(inputs, attention_mask=batch["attention_mask"], max_new_tokens=24, do_sample=False)
        start = torch.tensor([[model.config.decoder_start_token_id]])
        logits = model(inputs, decoder_input_ids=start).logits[0, -1]
        return known(tokenizer.decode(inputs[0]), inputs, tokenizer.decode(output[0]), logits)


Objective: TypeAlias = CausalObjective | MaskedObjective | SpanObjective
OBJECTIVES: dict[str, Callable[[float], Objective]] = {
    "ForCausalLM": lambda noise: CausalObjective(),
    "ForMaskedLM": MaskedObjective,
    "ForConditionalGeneration": SpanObjective,
}


def objective_of(folder: Any, noise: float = 0.15) -> Objective:
    """What the folder's model was trained to do; `noise` is the share of the tokens that it restores.

    Raises:
        ValueError: the folder's model has none of the heads that the pre-training recipes train.
    """
    name = (AutoConfig.from_pretrained(folder).architectures or [""])[0]
    for ending, objective in OBJECTIVES.items():
        if name.endswith(ending):
            return objective(noise)
    raise ValueError(f"{folder}: architectures is {name!r}, which should end with one of {', '.join(OBJECTIVES)}.")


def losses(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": perplexity(loss)}


def known(prompt: str, ids: torch.Tensor, text: str, logits: torch.Tensor) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "input_ids": ids[0].tolist(),
        "greedy": text,
        f"every_{EVERY}th_logit": logits[::EVERY].tolist(),
    }


def held_out_texts(pairs: Iterable[str]) -> dict[str, str]:
    """NAME=FILE → the file of each name.

    Raises:
        ValueError: another form.
    """
    pairs = list(pairs)
    if wrong := [pair for pair in pairs if not all(pair.partition("="))]:
        raise ValueError(f"held_out: {wrong[0]!r} must have the form NAME=FILE.")
    return dict(pair.split("=", 1) for pair in pairs)
