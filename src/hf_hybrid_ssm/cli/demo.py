"""Train a small Longhorn on text that Python carries, evaluate, save, reload, generate, and score it with lm-eval.

It takes a few minutes on two cores and needs no network. It writes summary.json, loss.png and the model below
--output, which must be empty, or of an earlier demo. It says what to type where a package is missing.

Examples:
    hf-hybrid-ssm demo
    hf-hybrid-ssm demo --output runs/demo --steps 900
"""

import argparse
import sys
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import add_json, check_writable, parser_of
from hf_hybrid_ssm.cli.recipe import EXTRAS, run_recipe
from hf_hybrid_ssm.extras import install_command, missing_modules

NEEDED = ("datasets", "lm_eval", "matplotlib", "yaml")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("demo", __doc__)
    parser.add_argument(
        "--output", default="runs/demo", metavar="FOLDER", help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=900, metavar="N", help="steps of training (default: %(default)s)")
    parser.add_argument(
        "--questions", type=int, default=200, metavar="N", help="questions of lm-eval (default: %(default)s)"
    )
    parser.add_argument("--documents", type=int, metavar="N", help="documents to train and evaluate on (default: all)")
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    args = build_parser().parse_args(arguments)
    try:
        check_writable(Path(args.output), is_folder=True)
    except OSError as error:
        print(f"hf-hybrid-ssm demo: --output: {error}", file=sys.stderr)
        return 1
    if missing := [name for name in NEEDED if name in missing_modules(*EXTRAS["demo"])]:
        raise SystemExit(f"{', '.join(missing)} not installed; the demo needs: {install_command(*EXTRAS['demo'])}")
    flags = ["--json"] if args.json else []
    given = {name: value for name, value in vars(args).items() if name != "json" and value is not None}
    return run_recipe("demo", [*(f"--{name}={value}" for name, value in given.items()), *flags])
