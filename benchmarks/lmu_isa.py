"""LMU-ISA: its kernel against its products and the paper's FFT, growth with length, GPT-2 of equal width.

The row of table 3 with a million parameters beside the embedding; a small vocabulary, so that the head does not hide
the layers, and once with the paper's. Float32. With `--device cuda` the kernel, which runs on the CPU, is left out.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext

import torch
from timing import exponent, megabytes_in_own_process, paired_seconds, peak_megabytes_of, write_results
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_hybrid_ssm import LmuIsaConfig, LmuIsaForCausalLM
from hf_hybrid_ssm.ops.core.dispatch import backend

VOCABULARY = 500
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
DEVICE = "cpu"
KERNEL = "kernel"  # what runs by default on a CPU; the other forms are plain torch


def forms() -> list[str]:
    return [KERNEL, "chunked", "fft"] if DEVICE == "cpu" else ["chunked", "fft"]


def default_form() -> str:
    return forms()[0]


def build(name: str, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": 204, "n_layer": 2, "n_head": 12, "n_positions": 32768, "vocab_size": vocabulary}
        config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **TOKENS)
        model = GPT2LMHeadModel(config)
    else:
        model = LmuIsaForCausalLM(LmuIsaConfig.preset("1m", vocab_size=vocabulary, **TOKENS))
        for layer in model.model.layers:
            layer.memory.form = "auto" if name == KERNEL else name
    model.config.use_cache = False
    return model.train().to(DEVICE)


def in_torch(name: str):
    """The context in which a form runs."""
    return backend("torch") if name in ("chunked", "fft") else nullcontext()


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def training_step(name: str, batch: int, length: int, vocabulary: int = VOCABULARY) -> Callable[[], None]:
    """Forward, loss, backward on random tokens."""
    model = build(name, vocabulary)
    tokens = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def step() -> None:
        with in_torch(name):
            model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
        wait()

    return step


def against_fft(batch: int, rounds: int) -> dict:
    steps = {name: training_step(name, batch, 1024) for name in forms()}
    seconds = paired_seconds(steps, rounds=rounds, warm_up=1)
    figures = {
        "batch": batch,
        "tokens_per_second": {name: round(batch * 1024 / value) for name, value in seconds.items()},
        "times_as_fast_as_fft": round(seconds["fft"] / seconds[default_form()], 2),
    }
    if DEVICE == "cpu":
        memory = {name: megabytes_in_own_process(__file__, memory=name, batch=batch) for name in steps}
        figures["peak_megabytes"] = {name: round(value, 1) for name, value in memory.items()}
        figures["share_of_the_memory_of_fft"] = round(memory[KERNEL] / memory["fft"], 3)
    return figures


def by_length(lengths: list[int], rounds: int) -> dict:
    figures: dict = {"lmu_isa_seconds": {}, "gpt2_seconds": {}, "lmu_isa_times_as_fast_as_gpt2": {}}
    for length in lengths:
        steps = {"lmu_isa": training_step(default_form(), 1, length), "gpt2": training_step("gpt2", 1, length)}
        seconds = paired_seconds(steps, rounds=rounds, warm_up=1)
        for name, value in seconds.items():
            figures[f"{name}_seconds"][str(length)] = round(value, 4)
        figures["lmu_isa_times_as_fast_as_gpt2"][str(length)] = round(seconds["gpt2"] / seconds["lmu_isa"], 2)
    figures["exponent"] = round(exponent(lengths, list(figures["lmu_isa_seconds"].values())), 3)
    return figures


def with_head(rounds: int) -> dict:
    """The same step with the paper's vocabulary, as the row of the table is trained."""
    steps = {name: training_step(name, 1, 1024, 50257) for name in (default_form(), "gpt2")}
    seconds = paired_seconds(steps, rounds=rounds, warm_up=1)
    return {
        "vocabulary": 50257,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "lmu_isa_times_as_fast_as_gpt2": round(seconds["gpt2"] / seconds[default_form()], 2),
    }


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small batch, short lengths, few rounds")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", choices=[KERNEL, "chunked", "fft"], help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=8, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    DEVICE = arguments.device
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        training_step(arguments.memory, 1, 64)()
        print(peak_megabytes_of(training_step(arguments.memory, arguments.batch, 1024)))
        return
    suffix = "" if DEVICE == "cpu" else "_cuda"
    batch, rounds = (2, 2) if arguments.quick else (8, 3)
    lengths = [512, 1024] if arguments.quick else [1024, 2048, 4096, 8192, 16384]
    figures = {
        "training_step_at_1024": against_fft(batch, rounds),
        "training_step_of_one_row": by_length(lengths, 2 if arguments.quick else 3),
        "training_step_of_one_row_of_1024_with_the_head": with_head(rounds),
    }
    write_results(f"lmu_isa{suffix}", figures)


if __name__ == "__main__":
    main()
