"""What does SPADE's state-space model cost, and what does full attention, by length? A training step's time and memory
(figure 5 of the paper), and prefill in pieces.

Width 768, 12 heads, window 129, S4 of state 64 in the bottom of 4 layers, float32, one row. SPADE base has 12 layers
on the same S4: its share there is a third. The stack without it is the same but for the missing branch, and the one of
full attention is that without windows.
"""

import argparse
from collections.abc import Callable

import torch
from timing import machine_arguments, megabytes_in_own_process, paired_seconds, peak_megabytes_of, write_results

from hf_hybrid_ssm import SpadeConfig, SpadeForCausalLM

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 4,
    "sliding_window": 129,
    "dropout": 0.0,
    "embedding_dropout": 0.0,
    "attention_dropout": 0.0,
}
STACKS: dict[str, dict] = {
    "with": {},
    "without": {"ssm_layers": []},
    "full attention": {"ssm_layers": [], "attention_type": "full"},
}


def build(device: str, **fields) -> SpadeForCausalLM:
    torch.manual_seed(0)
    return SpadeForCausalLM(SpadeConfig(**SHAPE | fields)).to(device)


def tokens(length: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(0)).to(device)


def training_step(model: SpadeForCausalLM, length: int) -> Callable[[], None]:
    """Forward, loss, backward."""
    ids = tokens(length, model.device)
    model.train()

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def prefill(model: SpadeForCausalLM, length: int, piece: int) -> Callable[[], None]:
    """The prompt in pieces of `piece` tokens into one cache, with the logits of the last token of each."""
    model.eval()
    pieces = tokens(length, model.device).split(piece, dim=1)

    @torch.no_grad()
    def run() -> None:
        past = None
        for ids in pieces:
            past = model(ids, cache=past, use_cache=True, logits_to_keep=1).cache

    return run


def training_steps(length: int, rounds: int, device: str, depth: dict[str, int], quick: bool) -> dict:
    """Seconds and megabytes of every stack, and what the S4 adds to the seconds."""
    steps = {name: training_step(build(device, **depth, **fields), length) for name, fields in STACKS.items()}
    seconds = paired_seconds(steps, rounds=rounds, warm_up=1, device=device)
    return {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "added_percent": round(100 * (seconds["with"] / seconds["without"] - 1), 1),
        "peak_megabytes": {
            name: round(megabytes_in_own_process(__file__, memory=name, length=length, device=device, quick=quick))
            for name in STACKS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two layers, short, few rounds")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments = machine_arguments(parser, threads=1)  # two threads wait for each other wherever anything else runs
    device = arguments.device
    depth = {"num_hidden_layers": 2} if arguments.quick else {}
    if arguments.memory:
        model = build(device, **depth, **STACKS[arguments.memory])
        step = training_step(model, arguments.length)
        step()  # computes the S4's filters, which are frozen and kept
        print(peak_megabytes_of(step, device))
        return
    lengths, piece, rounds = ([512], 128, 3) if arguments.quick else ([1024, 2048, 4096], 256, 5)
    share = {str(size): training_steps(size, rounds, device, depth, arguments.quick) for size in lengths}
    with_s4, length = build(device, **depth), lengths[0]
    length, piece = 2 * length, 2 * piece
    runs = {"whole": prefill(with_s4, length, length), "pieces": prefill(with_s4, length, piece)}
    seconds = paired_seconds(runs, rounds=rounds, warm_up=1, device=device)
    figures = {
        "shape": SHAPE | depth | {"ssm_state_size": 64, "batch": 1, "dtype": "float32"},
        "training_step": share,
        "prefill": {
            "tokens": length,
            "piece": piece,
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "pieces_to_whole": round(seconds["pieces"] / seconds["whole"], 2),
        },
    }
    write_results("spade_ssm_cost", figures, device)


if __name__ == "__main__":
    main()
