"""How fast is a training step of Longhorn, next to transformers' Mamba and Llama; is it linear; what memory?

Two layers, width 128, state 16, vocabulary 500, one row, float32: the smallest model at which a training loop is still
interesting, where overhead shows most. "native" is the fused kernel: C on a CPU, Triton on CUDA.
"""

import argparse
from collections.abc import Callable

import torch
from timing import (
    exponent,
    machine_arguments,
    megabytes_in_own_process,
    paired_seconds,
    peak_megabytes_of,
    write_results,
)
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM
from hf_hybrid_ssm.ops.core.dispatch import backend

WIDTH, DEPTH, STATE, VOCABULARY = 128, 2, 16, 500
SHAPE = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "vocab_size": VOCABULARY}
MEMORY_LENGTHS = (2048, 8192)


def build(name: str, device: str) -> PreTrainedModel:
    """A model of the common shape, ready to train."""
    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if name == "longhorn":
        model = LonghornForCausalLM(LonghornConfig(**SHAPE, state_size=STATE, **tokens))
    elif name == "llama":
        sizes = {"intermediate_size": 4 * WIDTH, "num_attention_heads": 2, "max_position_embeddings": 65536}
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **sizes, **tokens))
    else:
        scan = {"use_associative_scan": name == "mamba_compiled", "use_mambapy": False}
        model = MambaForCausalLM(MambaConfig(**SHAPE, state_size=STATE, **scan, **tokens))
    model.config.use_cache = False
    return model.train().to(device)


def training_step(model: PreTrainedModel, length: int, kernel: str | None = None, call=None) -> Callable[[], None]:
    """Forward, loss, backward and AdamW on one random row; without `kernel` each op takes its fastest backend."""
    tokens = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    call = model if call is None else call

    def step() -> None:
        if kernel is None:
            loss = call(input_ids=tokens, labels=tokens).loss
        else:
            with backend(kernel):
                loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed(length: int, rounds: int, device: str) -> dict:
    """Tokens/s of each model at one length, all in turns."""
    mamba = build("mamba_compiled", device)
    steps = {
        "longhorn native": training_step(build("longhorn", device), length),
        "longhorn torch": training_step(build("longhorn", device), length, "torch"),
        "mamba compiled, associative scan": training_step(mamba, length, call=torch.compile(mamba)),
        "mamba eager": training_step(build("mamba", device), length),
        "llama": training_step(build("llama", device), length),
    }
    seconds = paired_seconds(steps, rounds=rounds, device=device)
    ratios = {name: seconds[name] / seconds["longhorn native"] for name in seconds}
    return {
        "length": length,
        "tokens_per_second": {name: round(length / value) for name, value in seconds.items()},
        "longhorn_native_times_as_fast": {name: round(ratio, 2) for name, ratio in ratios.items()},
    }


def scaling(lengths: list[int], rounds: int, device: str) -> dict:
    """Seconds of a step by length, and the exponent of their growth."""
    figures: dict[str, dict] = {}
    for name, kernel in (("longhorn native", None), ("longhorn torch", "torch")):
        model = build("longhorn", device)
        steps = {str(length): training_step(model, length, kernel) for length in lengths}
        seconds = paired_seconds(steps, rounds=rounds, warm_up=1, device=device)
        figures[name] = {
            "seconds": {length: round(value, 4) for length, value in seconds.items()},
            "exponent": round(exponent(lengths, list(seconds.values())), 3),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short lengths, few rounds")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=512, help=argparse.SUPPRESS)
    arguments = machine_arguments(parser)
    device = arguments.device
    if arguments.memory:
        model = build(arguments.memory, device)
        training_step(model, 64)()  # allocates the optimizer's states
        print(peak_megabytes_of(training_step(model, arguments.length), device))
        return
    lengths = [512, 1024, 2048] if arguments.quick else [512, 1024, 2048, 4096, 8192, 16384]
    memory = {
        str(length): {
            name: round(megabytes_in_own_process(__file__, memory=name, length=length, device=device), 1)
            for name in ("longhorn", "llama")
        }
        for length in MEMORY_LENGTHS
    }
    figures = {
        "shape": SHAPE | {"state_size": STATE, "batch": 1, "dtype": "float32"},
        "training_step": speed(512, 3 if arguments.quick else 15, device),
        "by_length": scaling(lengths, 3 if arguments.quick else 7, device),
        "peak_megabytes_of_a_step": memory,
    }
    write_results("longhorn_training", figures, device)


if __name__ == "__main__":
    main()
