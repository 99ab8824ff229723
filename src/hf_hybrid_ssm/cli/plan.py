"""Measure what a training step of a preset needs, in memory of each device and in operations, without running it:

    hf-hybrid-ssm plan longhorn/125m --gpus 8 --batch 8 --length 1024 --sharding fsdp2

Without a preset: their names.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import parser_of
from hf_hybrid_ssm.planning.setup import DTYPE_BYTES, KERNELS, OPTIMIZERS, SHARDINGS, Setup

CHOICES = {"dtype": tuple(DTYPE_BYTES), "optimizer": OPTIMIZERS, "sharding": SHARDINGS, "kernels": KERNELS}
HELP = {
    "batch": "rows on each device",
    "length": "tokens of a row",
    "gpus": "devices",
    "dtype": "of weights, gradients and optimizer state",
    "optimizer": "adamw, or sgd without momentum",
    "sharding": "ddp (each device holds everything) or fsdp2 (in shards)",
    "kernels": "fused kernels, or plain torch",
}


def main(arguments: list[str]) -> int:
    parser = parser_of("plan", __doc__)
    parser.add_argument("preset", metavar="FAMILY/PRESET", nargs="?", help="for instance longhorn/125m")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write a page with the papers' presets instead")
    for name, text in HELP.items():
        default = getattr(Setup, name)
        kind = {"choices": CHOICES[name]} if name in CHOICES else {"type": int, "metavar": "N"}
        parser.add_argument(f"--{name}", default=default, help=f"{text} (default: {default})", **kind)
    parser.add_argument("--bf16", action="store_true", dest="mixed_precision", help="compute in bfloat16 (autocast)")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing of every layer")
    given = parser.parse_args(arguments)
    if given.preset is not None and given.markdown is not None:
        parser.error("give FAMILY/PRESET, or --markdown, which is about all of them")
    from hf_hybrid_ssm.planning.presets import preset_config, preset_names
    from hf_hybrid_ssm.planning.report import description, page
    from hf_hybrid_ssm.planning.training_step import plan

    if given.markdown is not None:
        command = f"hf-hybrid-ssm plan --markdown {given.markdown.as_posix()}"
        given.markdown.write_text(page(Setup(mixed_precision=True), command), encoding="utf-8")
        print(f"wrote {given.markdown}")
        return 0
    if given.preset is None:
        names = preset_names()
        print(json.dumps(names, indent=2) if given.json else "\n".join(names))
        return 0
    setup = Setup(**{field.name: getattr(given, field.name) for field in fields(Setup)})
    found = plan(preset_config(given.preset), setup)
    if given.json:
        sums = {"total": found.total, "step_flops": found.step_flops}
        print(json.dumps({"preset": given.preset, "setup": asdict(setup)} | asdict(found) | sums, indent=2))
    else:
        print(description(given.preset, found, setup))
    return 0
