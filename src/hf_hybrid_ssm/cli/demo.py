"""End to end in a few minutes on two cores, without a network: train a small Longhorn on text that Python carries,
evaluate, save, reload, generate, score with lm-eval.

Writes summary.json, loss.png and the model below --output, which must be empty, or of an earlier demo. Says what to
type where a package is missing.
"""

import sys
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import check_writable, parser_of
from hf_hybrid_ssm.cli.recipe import EXTRAS, run_recipe
from hf_hybrid_ssm.extras import install_command, missing_modules

NEEDED = ("datasets", "lm_eval", "matplotlib", "yaml")


def main(arguments: list[str]) -> int:
    parser = parser_of("demo", __doc__)
    parser.add_argument("--output", default="runs/demo", metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=900, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=200, metavar="N", help="of lm-eval (default: %(default)s)")
    parser.add_argument("--documents", type=int, metavar="N", help="to train and evaluate on, at the most")
    given = parser.parse_args(arguments)
    try:
        check_writable(Path(given.output), is_folder=True)
    except OSError as error:
        print(f"hf-hybrid-ssm demo: --output: {error}", file=sys.stderr)
        return 1
    if missing := [name for name in NEEDED if name in missing_modules(*EXTRAS["demo"])]:
        raise SystemExit(f"{', '.join(missing)} not installed; the demo needs: {install_command(*EXTRAS['demo'])}")
    return run_recipe("demo", [f"--{name}={value}" for name, value in vars(given).items() if value is not None])
