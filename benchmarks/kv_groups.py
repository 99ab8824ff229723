"""Would single key/value groups keep as much recall as whole layers do, with a smaller cache?

    python benchmarks/kv_groups.py TEACHER [--window 256] [--prompts 24] [--dtype bfloat16]

TEACHER is a folder or a GGUF file. Its layers, and its groups one by one, are ranked by what recall loses when they
see a window (`rank_layers_by_recall`, `rank_groups_by_recall`). Then the teacher answers prompts that neither ranking
has seen, with full attention in so many layers or groups alone. Nothing is trained. Half an hour of one core for a
teacher of 30 layers.
"""

import argparse

import torch
from timing import machine_arguments, write_results

from hf_hybrid_ssm.upcycle import Keep, Teacher, load_teacher
from hf_hybrid_ssm.upcycle.measurements import cache_bytes
from hf_hybrid_ssm.upcycle.probe_prompts import recall_prompts
from hf_hybrid_ssm.upcycle.recall import rank_groups_by_recall, rank_layers_by_recall, recall_of
from hf_hybrid_ssm.upcycle.student import config_of

LENGTH = 65536  # tokens of the cache that is counted, in bfloat16
LAYERS = (2, 4, 6, 8)
GROUPS = (3, 6, 9, 12, 15, 18, 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="a folder or a GGUF file")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=24, help="that are answered after the ranking")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = machine_arguments(parser, threads=1)
    teacher, window = load_teacher(arguments.teacher), arguments.window
    teacher = Teacher(teacher.model.to(getattr(torch, arguments.dtype)), teacher.tokenizer, teacher.source)
    groups = [(layer, group) for layer in teacher.layers for group in range(teacher.groups)]
    layers = rank_layers_by_recall(teacher, window).layers
    ranked = rank_groups_by_recall(teacher, window).layers
    prompts = recall_prompts(teacher.tokenizer, teacher.config.vocab_size, window, count=arguments.prompts, seed=1)
    asked = {"teacher": groups}
    asked |= {f"{n} layers": [part for part in groups if part[0] in layers[:n]] for n in LAYERS}
    asked |= {f"{n} groups": ranked[:n] for n in GROUPS}
    models = {}
    for name, kept in asked.items():
        score = recall_of(teacher, prompts, window, [group for group in groups if group not in kept])
        models[name] = {
            "groups": len(kept),
            "right": score.right,
            "log_probability": score.log_probability,
            "cache_bytes": cache_bytes(config_of(teacher.config, Keep(kept, window=window)), LENGTH, "bfloat16"),
        }
        print(name, models[name], flush=True)
    tokens = sum(len(prompt.positions) for prompt in prompts)
    settings = {"window": window, "prompts": arguments.prompts, "tokens": tokens, "dtype": arguments.dtype}
    order = {"layers": layers[: max(LAYERS)], "groups": ranked[: max(GROUPS)]}
    write_results("kv_groups", {"settings": settings, "order": order, "models": models})


if __name__ == "__main__":
    main()
