"""Constant sinks of a student's windows: the key and the value that a first token has.

A pretrained transformer rests most of its attention on the first token, as a place to put none (Xiao et al., arXiv
2309.17453), and a window that has moved on takes that place away. The key of a first token depends on that token
alone, and above the lowest layers hardly on it: so it can be a constant of the layer, made without any text from
forwards of length one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TEXTS = ("a", "The")
TOKENS = 256
"""How many tokens of the vocabulary a sink is the mean of, where no token begins every text or conversation."""


def init_sinks(student: Any, teacher: Any, tokenizer: Any | None = None, seed: int = 0) -> None:
    """Set the constant sinks of a student's windows: for each layer and key/value head the mean of its unrotated key
    and of its value, over forwards of the teacher of length one.

    Args:
        student: its layers are the teacher's, in order; those without a constant sink are left as they are.
        teacher: a causal language model; not changed.
        tokenizer: the teacher's. If it, or its chat template, begins every text with one token, that one is taken.
        seed: of the other teachers' tokens, drawn from the vocabulary.
    """
    layers = student.model.layers
    sinks = {index: sink for index, layer in enumerate(layers) if (sink := _sink_of(layer)) is not None}
    if not sinks:
        return
    ids = first_tokens(teacher.config.vocab_size, tokenizer, seed).to(teacher.device)
    training = teacher.training
    teacher.eval()
    try:
        with torch.no_grad(), _keys_and_values(teacher, list(sinks)) as by_layer:
            teacher.model(input_ids=ids, use_cache=False)
    finally:
        teacher.train(training)
    with torch.no_grad():
        for index, sink in sinks.items():
            groups = getattr(_attention_of(layers[index]), "window_groups", slice(None))  # the others need no sink
            for name, target in (("key", sink.key), ("value", sink.value)):
                of_heads = by_layer[index][name].float().view(len(ids), -1, target.shape[1])
                target.copy_(of_heads.mean(0)[groups])


def constant_sinks(student: Any) -> list[str]:
    """The modules of a student's constant sinks, by name: what windows have beyond their teacher's attention."""
    sinks = {id(sink) for layer in student.model.layers if (sink := _sink_of(layer)) is not None}
    return [name for name, module in student.named_modules() if id(module) in sinks]


def first_tokens(vocab_size: int, tokenizer: Any | None, seed: int) -> torch.Tensor:
    """Token ids (B, 1): the one that the tokenizer or else its chat template begins every text with, or `TOKENS` drawn
    from the vocabulary."""
    if tokenizer is not None:
        begins = {tuple(tokenizer(text)["input_ids"][:1]) for text in TEXTS}
        if begins == {(tokenizer.bos_token_id,)}:
            return torch.tensor([[tokenizer.bos_token_id]])
        if getattr(tokenizer, "chat_template", None):
            begins = {tuple(_message(tokenizer, text)[:1]) for text in TEXTS}
            if len(begins) == 1:
                return torch.tensor([begins.pop()])
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:TOKENS].unsqueeze(1)


def _message(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a conversation that a user begins with a text."""
    conversation = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    return tokenizer(conversation, add_special_tokens=False)["input_ids"]


def _attention_of(layer: Any) -> Any:
    return getattr(layer, "self_attn", getattr(layer, "attention", None))


def _sink_of(layer: Any) -> Any:
    sink = getattr(_attention_of(layer), "sink", None)
    return sink if sink is not None and sink.kind == "constant" else None


@contextmanager
def _keys_and_values(teacher: Any, layers: list[int]) -> Iterator[dict[int, dict[str, torch.Tensor]]]:
    """While the teacher runs, what its layers make of their input: keys before the rotation, after their norm, and
    values."""
    by_layer: dict[int, dict[str, torch.Tensor]] = {index: {} for index in layers}

    def keeps(index: int, name: str) -> Any:
        return lambda module, args, output: by_layer[index].__setitem__(name, output)

    hooks = []
    for index in layers:
        attention = teacher.model.layers[index].self_attn
        of_keys = getattr(attention, "k_norm", None) or attention.k_proj
        hooks.append(of_keys.register_forward_hook(keeps(index, "key")))
        hooks.append(attention.v_proj.register_forward_hook(keeps(index, "value")))
    try:
        yield by_layer
    finally:
        for hook in hooks:
            hook.remove()
