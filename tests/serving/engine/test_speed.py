"""Thirty-two requests at once: `generate` one by one, `generate` in left-padded batches, vLLM, and vLLM's own Llama.

Prompts of 8 to 200 random tokens, answers of 8 to 48, float32, no stop. The two cores of the machine are shared with
other work; so what counts is the processor's time of this process, in one thread, not the time on the clock (which is
given too, of the fastest run). On a GPU: not measured.
"""

import random
import statistics
import time
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams, TokensPrompt

from tests.serving.engine.engines import FAMILIES, engine_of, folder_of, generated, model_of, prompts_of

REQUESTS = 32
REPETITIONS = 2
BATCH = 8
DRAW = random.Random(0)
LENGTHS = [DRAW.randint(8, 200) for _ in range(REQUESTS)]
WANTED = [DRAW.randint(8, 48) for _ in range(REQUESTS)]


def one_by_one(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [generated(model, [prompt], count)[0] for prompt, count in zip(prompts, WANTED)]


def in_batches(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """As they come, eight at a time, each batch for as long as one of its answers needs."""
    texts: list[list[int]] = []
    for first in range(0, REQUESTS, BATCH):
        counts = WANTED[first : first + BATCH]
        rows = generated(model, prompts[first : first + BATCH], max(counts))
        texts += [row[:count] for row, count in zip(rows, counts)]
    return texts


def in_vllm(engine: LLM, prompts: list[list[int]]) -> list[list[int]]:
    asked = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in WANTED]
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in engine.generate(given, asked, use_tqdm=False)]


def timed(run: Callable[[], list[list[int]]], record: Callable[[str, str], None]) -> list[list[int]]:
    """The mean of some repetitions, after one that warms up; returns the texts, which are the same each time."""
    texts, seconds, clock = run(), [], []
    for _ in range(REPETITIONS):
        begun, clock_begun = time.process_time(), time.perf_counter()
        assert run() == texts
        seconds.append(time.process_time() - begun)
        clock.append(time.perf_counter() - clock_begun)
    record("requests a second", f"{REQUESTS / statistics.mean(seconds):.1f}")
    record("new tokens a second", f"{sum(WANTED) / statistics.mean(seconds):.0f}")
    record("seconds of each run", " ".join(f"{second:.2f}" for second in seconds))
    record("requests a second by the clock", f"{REQUESTS / min(clock):.1f}")
    return texts


WAYS = ("generate, one by one", "generate, batches of 8", "vLLM")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [*FAMILIES, "llama"])
def test_speed(model, way, record_property):
    """The checkpoints of books, 2.4 to 4.5 million parameters each; Llama in vLLM runs by vLLM's own code."""
    folder = folder_of(model)
    ours = model_of(folder)
    prompts = prompts_of(ours, LENGTHS, 11)
    if way == WAYS[0]:
        texts = timed(lambda: one_by_one(ours, prompts), record_property)
    elif way == WAYS[1]:
        texts = timed(lambda: in_batches(ours, prompts), record_property)
    else:
        with engine_of(folder, max_num_seqs=REQUESTS, enable_prefix_caching=False) as engine:
            texts = timed(lambda: in_vllm(engine, prompts), record_property)
    assert [len(text) for text in texts] == WANTED
    if model != "llama":
        assert texts == in_batches(ours, prompts)
