"""Would single key/value groups keep as much recall as whole layers do, with a smaller cache?

    python benchmarks/kv_groups.py TEACHER [--window 256] [--prompts 24] [--dtype bfloat16]

TEACHER is a folder or a GGUF file. Its layers, and its groups one by one, are ranked by what recall loses when they
see a window (`rank_layers_by_recall`, `rank_groups_by_recall`). Then the teacher answers prompts that neither ranking
has seen, with full attention in so many layers or groups alone, by its masks. Nothing is trained, and no student is
made. Half an hour of one core for a teacher of 30 layers.
"""

import argparse

import torch
from timing import machine_arguments, write_results

from hf_hybrid_ssm.upcycle import (
    load_teacher,
    rank_groups_by_recall,
    rank_layers_by_recall,
    recall_of,
    recall_prompts,
)
from hf_hybrid_ssm.upcycle.recall import groups_of

LENGTH = 65536  # tokens of the cache that is counted
LAYERS = (2, 4, 6, 8)
GROUPS = (3, 6, 9, 12, 15, 18, 24)


def cache_bytes(config, kept: int, window: int) -> int:
    """Of one sequence of `LENGTH` tokens in bfloat16."""
    total = config.num_hidden_layers * config.num_key_value_heads
    width = config.head_dim or config.hidden_size // config.num_attention_heads
    return 2 * 2 * width * (kept * LENGTH + (total - kept) * (window + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="a folder or a GGUF file")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=24, help="that are answered after the ranking")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = machine_arguments(parser, threads=1)
    teacher, tokenizer = load_teacher(arguments.teacher)
    teacher, window = teacher.to(getattr(torch, arguments.dtype)).eval(), arguments.window
    config = teacher.config
    groups = range(config.num_key_value_heads)
    layers = rank_layers_by_recall(teacher, tokenizer, window).layers
    ranked = rank_groups_by_recall(teacher, tokenizer, window).layers
    prompts = recall_prompts(tokenizer, config.vocab_size, window, count=arguments.prompts, seed=1)
    asked = {"teacher": [(layer, group) for layer in layers for group in groups]}
    asked |= {f"{n} layers": [(layer, group) for layer in layers[:n] for group in groups] for n in LAYERS}
    asked |= {f"{n} groups": ranked[:n] for n in GROUPS}
    models = {}
    for name, kept in asked.items():
        score = recall_of(teacher, prompts, window, [group for group in groups_of(config) if group not in kept])
        models[name] = {
            "groups": len(kept),
            "right": score.right,
            "log_probability": score.log_probability,
            "cache_bytes": cache_bytes(config, len(kept), window),
        }
        print(name, models[name], flush=True)
    tokens = sum(len(prompt.positions) for prompt in prompts)
    settings = {"window": window, "prompts": arguments.prompts, "tokens": tokens, "dtype": arguments.dtype}
    order = {"layers": layers[: max(LAYERS)], "groups": ranked[: max(GROUPS)]}
    write_results("kv_groups", {"settings": settings, "order": order, "models": models})


if __name__ == "__main__":
    main()
