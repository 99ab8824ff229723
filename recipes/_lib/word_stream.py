"""One unbroken stream of words, as fairseq's language models read WikiText-103: vocabulary, blocks, context."""

from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
