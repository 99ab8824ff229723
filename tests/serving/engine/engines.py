"""vLLM's engine in this process, and what `generate` gives for the same prompts. Its tests need vLLM."""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}
os.environ.update(SETTINGS)

from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

ROOT = Path(__file__).parents[3]
FAMILIES = ["longhorn", "bst", "spade", "lmu-isa"]
# cuts prompts and preempts requests: at most eight requests and 48 tokens at once, and twelve pages
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "block_size": 16, "num_gpu_blocks_override": 12}
NEW = 24


def folder_of(family: str) -> Path:
    """Its trained checkpoint."""
    return ROOT / f"checkpoints/{family}-books"


def model_of(folder: Path) -> PreTrainedModel:
    """By transformers, from the same folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@contextlib.contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[LLM]:
    """An engine in this process, which can have another one afterwards."""
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "disable_log_stats": False, "seed": 0}
    defaults |= {"skip_tokenizer_init": not (folder / "tokenizer.json").exists(), "enable_prefix_caching": True}
    engine = LLM(str(folder), **defaults | options)
    try:
        yield engine
    finally:
        shut_down(engine)


def shut_down(engine: LLM) -> None:
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()


def prompts_of(model: PreTrainedModel, lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def generated(model: PreTrainedModel, prompts: Sequence[list[int]], count: int = NEW) -> list[list[int]]:
    """The next tokens by `generate`, greedily, in a left-padded batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()


def answered(engine: LLM, prompts: Sequence[list[int]], **options: Any) -> list[RequestOutput]:
    """What the engine answers to prompts that are there at the same time."""
    asked = SamplingParams(**{"max_tokens": NEW, "temperature": 0, "ignore_eos": True} | options)
    return engine.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], asked, use_tqdm=False)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def counted(engine: LLM, name: str) -> int:
    """One of the engine's own counters."""
    return sum(metric.value for metric in engine.get_metrics() if metric.name == f"vllm:{name}")
