"""Measure what a training step of a model needs, in memory of each device and in operations, without running it.

Without a model it prints the names of the presets. Of a FOLDER only config.json is read.

Examples:
    hf-hybrid-ssm plan longhorn/125m --gpus 8 --batch 8 --length 1024 --sharding fsdp2
    hf-hybrid-ssm plan longhorn/125m config.state_size=32
    hf-hybrid-ssm plan FOLDER --bf16
"""

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import add_json, check_is_folder, check_writable, given_fields, is_path, parser_of
from hf_hybrid_ssm.planning.setup import DTYPE_BYTES, KERNELS, OPTIMIZERS, SHARDINGS, Setup

CHOICES = {"dtype": tuple(DTYPE_BYTES), "optimizer": OPTIMIZERS, "sharding": SHARDINGS, "kernels": KERNELS}
HELP = {
    "batch": "rows on each device",
    "length": "tokens of a row",
    "gpus": "number of devices",
    "dtype": "dtype of weights, gradients and optimizer state",
    "optimizer": "optimizer; sgd is without momentum",
    "sharding": "placement: with ddp each device holds everything, with fsdp2 a shard",
    "kernels": "kernels: fused ones, or plain torch",
}

TITLE = "# Plans of the presets"


def check_page(path: Path) -> None:
    """An OSError unless a page can be written there and replaces nothing else, before minutes of planning."""
    check_writable(path)
    if path.is_file() and not path.read_text(encoding="utf-8", errors="replace").startswith(TITLE):
        raise FileExistsError(f"{str(path)!r} is there and holds something else than such a page: name another file.")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("plan", __doc__)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="FAMILY/PRESET, such as longhorn/125m, or the FOLDER of a saved model",
    )
    parser.add_argument("fields", metavar="config.FIELD=VALUE", nargs="*", help="another value of a field")
    add_json(parser)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="page to write, with all of the papers' presets")
    for name, text in HELP.items():
        default = getattr(Setup, name)
        kind = {"choices": CHOICES[name]} if name in CHOICES else {"type": int, "metavar": "N"}
        parser.add_argument(f"--{name}", default=default, help=f"{text} (default: {default})", **kind)
    parser.add_argument("--bf16", action="store_true", dest="mixed_precision", help="compute in bfloat16 (autocast)")
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute every layer in the backward (gradient checkpointing)"
    )
    return parser


def _flags_of_a_model(args: argparse.Namespace) -> list[str]:
    """Those that were given another value than their default and say something of one model alone: names of presets
    have no training step, and the page has its own."""
    flags = {"mixed_precision": "--bf16"}
    given = [field.name for field in fields(Setup) if getattr(args, field.name) != field.default]
    as_json = ["--json"] if args.json and args.markdown is not None else []
    return [flags.get(name, f"--{name}") for name in given] + as_json


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_intermixed_args(arguments)
    if args.model is not None and args.markdown is not None:
        parser.error("give FAMILY/PRESET, or --markdown, which is about all of them")
    if args.model is None and (given := _flags_of_a_model(args)):
        parser.error(f"{', '.join(given)}: give FAMILY/PRESET or a FOLDER too, and no --markdown")
    overrides = given_fields(args.fields)
    if args.markdown is not None:
        check_page(args.markdown)
    from hf_hybrid_ssm.hub.configurations import config_of_folder, with_fields
    from hf_hybrid_ssm.planning.presets import preset_config, preset_names
    from hf_hybrid_ssm.planning.report import description, page
    from hf_hybrid_ssm.planning.training_step import plan

    if args.markdown is not None:
        command = f"hf-hybrid-ssm plan --markdown {args.markdown.as_posix()}"
        args.markdown.write_text(page(Setup(mixed_precision=True), command), encoding="utf-8")
        print(f"wrote {args.markdown}")
        return 0
    if args.model is None:
        names = preset_names()
        print(json.dumps(names, indent=2) if args.json else "\n".join(names))
        return 0
    setup = Setup(**{field.name: getattr(args, field.name) for field in fields(Setup)})
    is_preset = args.model in preset_names()
    if not is_preset and is_path(args.model):
        check_is_folder(args.model)
    is_folder = not is_preset and Path(args.model).is_dir()
    config = config_of_folder(args.model) if is_folder else preset_config(args.model)
    estimate = plan(with_fields(config, overrides), setup)
    name = " ".join([args.model, *args.fields])
    if args.json:
        sums = {"total": estimate.total, "step_flops": estimate.step_flops}
        print(
            json.dumps(
                {"folder" if is_folder else "preset": args.model, "config": overrides, "setup": asdict(setup)}
                | asdict(estimate)
                | sums,
                indent=2,
            )
        )
    else:
        print(description(name, estimate, setup))
    return 0
