"""transformers' own checks of FSDP2 on small models of every family, in the processes of one launch.

python -m torch.distributed.run --nproc_per_node 2 fsdp.py REPORT.json
"""

import json
import logging
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_hybrid_ssm  # noqa: F401 - registers the families
from tests.upstream.harness import fsdp_checks

# longer than every window, and steps before a checkpoint and after it; more of either show nothing new
fsdp_checks.SEQ_LEN, fsdp_checks.NUM_STEPS = 24, 4

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2}
HYBRID = {"layer_types": ["longhorn", "full_attention"], "mlp_intermediate_size": 128}
HYBRID |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SPADE = {"intermediate_size": 128, "num_attention_heads": 4, "sliding_window": 10, "ssm_trainable": "all"}
SPADE |= {"dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}
BST = {"intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "sliding_window": 16, "ssm_layers": [1]}
BST |= {"dropout": 0.0, "attention_dropout": 0.0, "final_dropout": 0.0}
CASES = {
    "longhorn": ("longhorn", {"state_size": 4}),
    "longhorn hybrid": ("longhorn", {"state_size": 4, **HYBRID}),
    "lmu_isa": ("lmu_isa", {"order": 16, "reduced_order": 4}),
    **{f"spade {ssm}": ("spade", {**SPADE, "ssm_type": ssm}) for ssm in ("s4", "s4d", "s5", "ema", "hyena", "lstm")},
    "spade frozen s4": ("spade", {**SPADE, "ssm_trainable": "none"}),
    "bst sh": ("bst", BST),
    "bst mh unstructured": ("bst", {**BST, "context_variant": "mh", "ssm_type": "unstructured"}),
    "bst mf s5": ("bst", {**BST, "context_variant": "mf", "ssm_type": "s5"}),
    "bst brect": ("bst", {**BST, "ssm_layers": None, "layer_types": ["window_attention", "block_recurrent"]}),
}
CHECKS = ("generation", "sharding_structure_untied", "sharding_structure_tied", "save_load", "plan_vs_ddp")
THOROUGH = ("longhorn hybrid", "lmu_isa", "spade s4", "bst sh")  # one of each family runs them all
ALL = [(case, check) for case in CASES for check in ("bf16_training", *(CHECKS if case in THOROUGH else ()))]


def bf16_training(rank: int, config_class: type, fields: dict) -> None:
    fsdp_checks._test_fsdp2_bf16_training_impl(rank, config_class, fields)


def sharding_structure_untied(rank: int, config_class: type, fields: dict) -> None:
    fsdp_checks._test_fsdp2_sharding_structure_impl(rank, config_class, fields, tie_word_embeddings=False)


def sharding_structure_tied(rank: int, config_class: type, fields: dict) -> None:
    fsdp_checks._test_fsdp2_sharding_structure_impl(rank, config_class, fields, tie_word_embeddings=True)


def save_load(rank: int, config_class: type, fields: dict) -> None:
    fsdp_checks._test_fsdp2_save_load_impl(rank, config_class, fields)


def plan_vs_ddp(rank: int, config_class: type, fields: dict) -> None:
    fsdp_checks._test_fsdp2_plan_vs_ddp_impl(rank, config_class, fields, tie_word_embeddings=False)


def generation(rank: int, config_class: type, fields: dict) -> None:
    """In shards, as on one device, a token at a time."""
    prompt, greedy = torch.arange(3, 23).unsqueeze(0), {"max_new_tokens": 6, "do_sample": False}
    config = config_class.from_dict(fields)
    with fsdp_checks._deterministic_init_model_dir(rank, config, torch.bfloat16) as folder:
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).generate(prompt, **greedy)
        options = {"distributed_config": DistributedConfig(fsdp_size=dist.get_world_size())}
        sharded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
        assert torch.equal(sharded.generate(prompt, **greedy), whole)


def outcome(case: str, check: str) -> str | None:
    """None if the check passes, else the error."""
    family, fields = CASES[case]
    config = AutoConfig.for_model(family, **SIZES | fields)
    try:
        globals()[check](dist.get_rank(), type(config), config.to_diff_dict())
    except Exception:
        return traceback.format_exc()
    return None


def main(report: Path) -> None:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = [(case, check, outcome(case, check)) for case, check in ALL]
    if dist.get_rank() == 0:
        report.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
