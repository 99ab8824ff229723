"""Students of SmolLM2-135M-Instruct, where their teacher's GGUF file is given.

With full attention in six layers, and in twelve key/value groups. Thirty-two requests at once in float32, greedily,
against `generate`. Two kernels of attention round differently; so where a text differs, the two tokens must be equally
probable to `NEAR` nats. The report counts such near ties.
"""

import os
import random

import pytest
import torch
from transformers import PreTrainedModel
from vllm import SamplingParams, TokensPrompt

from hf_hybrid_ssm.upcycle import Keep, load_teacher, upcycle
from tests.serving.engine.engines import engine_of, generated, model_of, prompts_of, tokens_of

TEACHER = "HF_HYBRID_SSM_SMOLLM2"
# the layers that `hf-hybrid-ssm upcycle --keep 6` chooses, and the groups of report_groups_cpu.yaml
GROUPS = [(18, 2), (7, 2), (23, 0), (8, 0), (21, 2), (22, 1), (17, 1), (20, 1), (3, 2), (15, 2), (17, 0), (5, 2)]
KEPT = {"six layers": [7, 15, 17, 18, 21, 23], "twelve groups": GROUPS}
REQUESTS, NEAR = 32, 1e-3
DRAW = random.Random(0)
LENGTHS = [DRAW.randint(8, 40) for _ in range(26)] + [DRAW.randint(258, 300) for _ in range(6)]
WANTED = [DRAW.randint(8, 16) for _ in range(REQUESTS)]


@pytest.mark.skipif(TEACHER not in os.environ, reason=f"{TEACHER} names no GGUF file of SmolLM2")
@torch.no_grad()
@pytest.mark.parametrize("kept", KEPT)
def test_student(kept, tmp_path, record_property):
    """Prompts of 8 to 300 random tokens, six of them longer than a window of 256; answers of 8 to 16."""
    teacher = load_teacher(os.environ[TEACHER])
    student, _ = upcycle(teacher, Keep(KEPT[kept], window=256), sink="constant")
    student.eval().save_pretrained(tmp_path, export_code=True)
    teacher.tokenizer.save_pretrained(tmp_path)
    del teacher, student
    model = model_of(tmp_path)
    prompts = prompts_of(model, LENGTHS, 12)
    asked = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in WANTED]
    given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    with engine_of(tmp_path, max_num_seqs=REQUESTS, max_model_len=1024) as engine:
        texts = tokens_of(engine.generate(given, asked, use_tqdm=False))
        record_property("tokens in a block of keys", f"{engine.llm_engine.vllm_config.cache_config.block_size:,}")
    assert [len(text) for text in texts] == WANTED
    ties = []
    for prompt, text, expected in zip(prompts, texts, in_batches(model, prompts)):
        if text != expected:
            at = next(i for i, (found, wanted) in enumerate(zip(text, expected)) if found != wanted)
            logits = model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
            ties.append(float(logits[expected[at]] - logits[text[at]]))
    record_property("new tokens", f"{sum(WANTED):,}")
    record_property("near ties", len(ties))
    assert all(abs(difference) < NEAR for difference in ties), ties


def in_batches(model: PreTrainedModel, prompts: list[list[int]], size: int = 8) -> list[list[int]]:
    """By `generate`, prompts of neighbouring places together."""
    texts: list[list[int]] = []
    for first in range(0, REQUESTS, size):
        counts = WANTED[first : first + size]
        rows = generated(model, prompts[first : first + size], max(counts))
        texts += [row[:count] for row, count in zip(rows, counts)]
    return texts
