"""One random case of each invariance: a name, and a function that draws it from a `random.Random` and checks it."""

import copy
from collections.abc import Callable
from random import Random
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache, StaticCache

from hf_hybrid_ssm.ops.core.dispatch import backend
from tests.memory import in_own_memory
from tests.models import invariances as inv
from tests.tiny_models import OF_FAMILIES, VARIANTS

Case = Callable[[torch.nn.Module, Random], float]


def _ids(model, random: Random, batch: int, length: int) -> torch.Tensor:
    return inv.random_ids(model, batch, length, random.randrange(2**31))


def _rows(model, random: Random, count: int | None = None) -> list[torch.Tensor]:
    return [_ids(model, random, 1, random.randint(1, 24)) for _ in range(count or random.randint(1, 4))]


def _cuts(random: Random, length: int) -> list[int]:
    return random.sample(range(1, length + 1), random.randint(0, min(length, 8)))


def split(model, random: Random) -> float:
    length = random.randint(1, 48)
    return inv.check_split(model, _ids(model, random, random.randint(1, 3), length), _cuts(random, length))


def padding(model, random: Random) -> float:
    side = random.choice(["left", "right", "both"])
    return inv.check_padded(model, _rows(model, random), side, extra=random.randint(0, 12))


def padded_turns(model, random: Random) -> float:
    count = random.randint(1, 3)
    turns = _rows(model, random, count), _rows(model, random, count)
    return inv.check_padded_continuation(model, *turns, random.choice(["left", "right", "both"]))


def packing(model, random: Random) -> float:
    return inv.check_packed(model, _rows(model, random), random.choice(["seq_idx", "position_ids"]))


def batch(model, random: Random) -> float:
    ids = _ids(model, random, 4, random.randint(1, 32))
    return inv.check_batch_order(model, ids, torch.tensor(random.sample(range(4), 4)))


def beam_reorder(model, random: Random) -> float:
    length = random.randint(2, 32)
    order = torch.tensor([random.randrange(3) for _ in range(3)])
    return inv.check_reorder(model, _ids(model, random, 3, length), order, random.randint(1, length - 1))


def rollback(model, random: Random) -> float:
    length = random.randint(2, 32)
    ids = _ids(model, random, random.randint(1, 2), length)
    return inv.check_rollback(model, ids, _cuts(random, length), random.randint(1, length - 1))


def static_cache(model, random: Random) -> float:
    length = random.randint(1, 32)
    cache = StaticCache(config=model.config, max_cache_len=64)
    return inv.check_split(model, _ids(model, random, 2, length), _cuts(random, length), cache=cache)


@torch.no_grad()
def copied_cache(model, random: Random) -> float:
    """A deep copy of a cache goes its own way, and the original is not touched."""
    prompt, a, b = (_ids(model, random, 2, random.randint(1, 16)) for _ in range(3))
    cache = DynamicCache(config=model.config)
    model(prompt, past_key_values=cache, use_cache=True)
    deviations = []
    for continuation, past in ((a, copy.deepcopy(cache)), (b, cache)):
        logits = model(continuation, past_key_values=past, use_cache=True).logits
        expected = inv.whole(model, torch.cat([prompt, continuation], 1))[:, prompt.shape[1] :]
        deviations.append(inv.deviation(logits, expected))
    return max(deviations)


@torch.no_grad()
def repeated_prompt(model, random: Random) -> float:
    """A cache read once and repeated for several continuations equals the continuations read from the start."""
    prompt, repeats = _ids(model, random, 2, random.randint(1, 16)), random.randint(1, 3)
    cache = DynamicCache(config=model.config)
    model(prompt, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(repeats)
    tails = _ids(model, random, 2 * repeats, random.randint(1, 8))
    logits = model(tails, past_key_values=cache, use_cache=True).logits
    whole = torch.cat([prompt.repeat_interleave(repeats, 0), tails], 1)
    return inv.deviation(logits, inv.whole(model, whole)[:, prompt.shape[1] :])


@torch.no_grad()
def embeddings(model, random: Random) -> float:
    ids = _ids(model, random, 2, random.randint(1, 24))
    return inv.deviation(
        model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False).logits, inv.whole(model, ids)
    )


@torch.no_grad()
def logits_to_keep(model, random: Random) -> float:
    ids = _ids(model, random, 2, random.randint(1, 24))
    keep = random.randint(1, ids.shape[1])
    return inv.deviation(model(ids, use_cache=False, logits_to_keep=keep).logits, inv.whole(model, ids)[:, -keep:])


@torch.no_grad()
def backends(model, random: Random) -> float:
    """Fused kernels, plain torch and the step-by-step references give the same logits."""
    ids = _ids(model, random, 2, random.randint(1, 32))
    expected = inv.whole(model, ids)
    deviations = []
    for name in ("torch", "reference"):
        with backend(name):
            deviations.append(inv.deviation(inv.whole(model, ids), expected))
    return max(deviations)


def saved_and_loaded(model, random: Random) -> float:
    """A checkpoint, whole or in shards, gives the very same logits."""
    ids = _ids(model, random, 2, random.randint(1, 32))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=random.choice(["1GB", "20KB"]))
        loaded = in_own_memory(AutoModelForCausalLM.from_pretrained(folder).eval())
    difference = (inv.whole(loaded, ids) - inv.whole(in_own_memory(model), ids)).abs().max().item()
    assert difference == 0, f"a loaded model differs by {difference}"
    return difference


@torch.no_grad()
def classifier(model, random: Random) -> float:
    """The classification head scores a padded row as it scores the row alone."""
    torch.manual_seed(0)
    head = AutoModelForSequenceClassification.from_config(model.config).eval()
    rows = _rows(model, random)
    ids, mask = inv.pad_rows(rows, 0, random.choice(["left", "right", "both"]), random.randint(0, 5))
    logits = head(ids, attention_mask=mask).logits
    return inv.deviation(logits, torch.cat([head(row).logits for row in rows]))


def _greedy(model, ids: torch.Tensor, **options) -> torch.Tensor:
    return model.generate(ids, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **options)


def _same_text(text: torch.Tensor, expected: torch.Tensor) -> float:
    assert text.tolist() == expected.tolist(), f"{text.tolist()} is not the greedy text {expected.tolist()}"
    return 0.0


def greedy_text(model, random: Random) -> float:
    """Cached, chunked and static generation write the text that generation without a cache writes."""
    ids = _ids(model, random, 2, random.randint(1, 24))
    options = random.choice(
        [{}, {"prefill_chunk_size": random.randint(1, 7)}, {"cache_implementation": "static", "disable_compile": True}]
    )
    return _same_text(_greedy(model, ids, **options), _greedy(model, ids, use_cache=False))


def padded_text(model, random: Random) -> float:
    """A left-padded batch writes for each row what the row alone writes."""
    rows = _rows(model, random)
    ids, mask = inv.pad_rows(rows, 0, "left")
    text = _greedy(model, ids, attention_mask=mask)[:, -8:]
    return _same_text(text, torch.cat([_greedy(model, row)[:, -8:] for row in rows]))


def assisted_text(model, random: Random) -> float:
    """A draft model changes the time, not the text; the draft is this model with disturbed weights."""
    ids = _ids(model, random, 1, random.randint(1, 24))
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data.add_(random.choice([0.0, 0.02, 0.2]) * noise)
    return _same_text(_greedy(model, ids, assistant_model=draft), _greedy(model, ids))


def prompt_lookup_text(model, random: Random) -> float:
    """Guessing from the prompt changes the time, not the text."""
    ids = _ids(model, random, 1, random.randint(2, 6)).repeat(1, random.randint(1, 4))
    return _same_text(_greedy(model, ids, prompt_lookup_num_tokens=random.randint(1, 4)), _greedy(model, ids))


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        split, padding, padded_turns, packing, batch, beam_reorder, rollback, static_cache, copied_cache,
        repeated_prompt, embeddings, logits_to_keep, backends, saved_and_loaded, classifier,
        greedy_text, padded_text, assisted_text, prompt_lookup_text,
    )
}  # fmt: skip
COMBINATIONS = [
    (case, variant) for variant in VARIANTS for case in CASES if case != "classifier" or variant in OF_FAMILIES
]
"""Students have no heads for classes."""
OF_ROWS = ("split", "padding", "padded_turns", "packing", "batch", "beam_reorder", "rollback")
RARER = ("spade s4 trained", "spade s4d output", "spade ema", "spade lstm", "spade adaptive")
COMBINATIONS += [(case, variant) for variant in RARER for case in OF_ROWS]
