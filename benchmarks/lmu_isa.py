"""LMU-ISA on CPU: the chunked form against the paper's FFT, growth with length, decoding, and GPT-2 of equal width.

The row of table 3 with a million parameters beside the embedding; a small vocabulary, so that the head does not hide
the layers, and once with the paper's. Float32.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch
from timing import exponent, paired_seconds, peak_megabytes_of, write_results
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_hybrid_ssm import LmuIsaConfig, LmuIsaForCausalLM

VOCABULARY = 500
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}


def build(name: str, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": 204, "n_layer": 2, "n_head": 12, "n_positions": 32768, "vocab_size": vocabulary}
        config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **TOKENS)
        model = GPT2LMHeadModel(config)
    else:
        model = LmuIsaForCausalLM(LmuIsaConfig.preset("1m", vocab_size=vocabulary, **TOKENS))
        for layer in model.model.layers:
            layer.memory.form = name
    model.config.use_cache = False
    return model.train()


def training_step(model: PreTrainedModel, batch: int, length: int) -> Callable[[], None]:
    """Forward, loss, backward on random tokens."""
    tokens = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()

    return step


def against_fft(batch: int, rounds: int) -> dict:
    steps = {name: training_step(build(name), batch, 1024) for name in ("chunked", "fft")}
    seconds = paired_seconds(steps, rounds=rounds, warm_up=1)
    memory = {name: memory_in_own_process(name, batch) for name in steps}
    return {
        "batch": batch,
        "tokens_per_second": {name: round(batch * 1024 / value) for name, value in seconds.items()},
        "times_as_fast_as_fft": round(seconds["fft"] / seconds["chunked"], 2),
        "peak_megabytes": {name: round(value, 1) for name, value in memory.items()},
        "share_of_the_memory_of_fft": round(memory["chunked"] / memory["fft"], 3),
    }


def by_length(lengths: list[int], rounds: int) -> dict:
    lmu, gpt2 = build("chunked"), build("gpt2")
    figures: dict = {"lmu_isa_seconds": {}, "gpt2_seconds": {}, "lmu_isa_times_as_fast_as_gpt2": {}}
    for length in lengths:
        steps = {"lmu_isa": training_step(lmu, 1, length), "gpt2": training_step(gpt2, 1, length)}
        seconds = paired_seconds(steps, rounds=rounds, warm_up=1)
        for name, value in seconds.items():
            figures[f"{name}_seconds"][str(length)] = round(value, 4)
        figures["lmu_isa_times_as_fast_as_gpt2"][str(length)] = round(seconds["gpt2"] / seconds["lmu_isa"], 2)
    figures["exponent"] = round(exponent(lengths, list(figures["lmu_isa_seconds"].values())), 3)
    return figures


def with_head(rounds: int) -> dict:
    """The same step with the paper's vocabulary, as the row of the table is trained."""
    steps = {name: training_step(build(name, 50257), 1, 1024) for name in ("chunked", "gpt2")}
    seconds = paired_seconds(steps, rounds=rounds, warm_up=1)
    return {
        "vocabulary": 50257,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "lmu_isa_times_as_fast_as_gpt2": round(seconds["gpt2"] / seconds["chunked"], 2),
    }


def decoding(rounds: int) -> dict:
    """Milliseconds per token after prompts of different lengths."""
    model = build("chunked").eval()
    token, candidates = torch.zeros(1, 1, dtype=torch.long), {}
    for length in (16, 4096):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(torch.zeros(1, length, dtype=torch.long), past_key_values=cache, use_cache=True, logits_to_keep=1)

        def step(cache=cache) -> None:
            with torch.inference_mode():
                model(token, past_key_values=cache, use_cache=True)

        candidates[str(length)] = step
    seconds = paired_seconds(candidates, rounds=5 * rounds)
    return {f"behind {length} tokens": round(1000 * value, 2) for length, value in seconds.items()}


def memory_in_own_process(name: str, batch: int) -> float:
    command = [sys.executable, __file__, "--memory", name, "--batch", str(batch)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small batch, short lengths, few rounds")
    parser.add_argument("--memory", choices=["chunked", "fft"], help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=8, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.memory:
        model = build(arguments.memory)
        training_step(model, 1, 64)()
        print(peak_megabytes_of(training_step(model, arguments.batch, 1024)))
        return
    batch, rounds = (2, 2) if arguments.quick else (8, 3)
    lengths = [512, 1024] if arguments.quick else [1024, 2048, 4096, 8192, 16384]
    figures = {
        "training_step_at_1024": against_fft(batch, rounds),
        "training_step_of_one_row": by_length(lengths, 2 if arguments.quick else 3),
        "training_step_of_one_row_of_1024_with_the_head": with_head(rounds),
        "decoding_milliseconds": decoding(rounds),
    }
    write_results("lmu_isa", figures)


if __name__ == "__main__":
    main()
